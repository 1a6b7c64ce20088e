"""The project's own Dag, whose runs are announced."""

from tidegate.dags.batch_dag import batch_dag

dag = batch_dag("flights", announce=True)
