"""The project's own Dag."""

from dags.batch_dag import batch_dag

dag = batch_dag("word_count")
