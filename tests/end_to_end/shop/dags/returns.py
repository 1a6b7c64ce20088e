"""Two runs, and two batches of each, at once are allowed; what is tried again begins sooner than usual."""

from datetime import timedelta

from tidegate import batch_dag

dag = batch_dag("returns", concurrency=2, max_active_runs=2, default_args={"retry_delay": timedelta(seconds=1)})
