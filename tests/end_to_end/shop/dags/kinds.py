"""Two runs at once are allowed, whose ends are announced; what is tried again begins sooner than usual."""

from datetime import timedelta

from tidegate import batch_dag

dag = batch_dag("kinds", max_active_runs=2, announce=True, default_args={"retry_delay": timedelta(seconds=1)})
