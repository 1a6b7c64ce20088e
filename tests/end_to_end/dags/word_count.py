"""The project's own Dag."""

from tidegate.dags.batch_dag import batch_dag

dag = batch_dag("word_count")
