"""The Dag of the pipeline orders."""

from tidegate import batch_dag

dag = batch_dag("orders")
