"""A batch that fails is given up at once."""

from tidegate import batch_dag

dag = batch_dag("ratings", default_args={"retries": 0})
