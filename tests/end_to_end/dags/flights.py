"""The project's own Dag, but with two active runs: the tests start them at the same moment."""

from tidegate.dags.batch_dag import batch_dag

dag = batch_dag("flights", max_active_runs=2)
