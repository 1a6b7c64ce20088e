"""Warms the Airflow processes that fork; Airflow imports this module in each of its processes.

LocalExecutor forks its workers from the scheduler, a Celery worker forks for every task, and the Dag processor for every file
it parses: modules that the parent has imported cost the child nothing, so a task that uses Spark starts much faster. No
connection may be opened before a fork, and no pipeline imported, or a running parent would hide an author's edits.

Nothing relies on it: where this module is not on the path, or each task has a process of its own, tasks import for themselves.
"""

import gc
import sys

# Nearly all objects created at start stay alive: collecting garbage less often makes imports cheaper.
gc.set_threshold(50_000)

runs_tasks = sys.argv[1:2] == ["scheduler"] or sys.argv[1:3] == ["celery", "worker"]
if runs_tasks or sys.argv[1:2] == ["dag-processor"]:
    import airflow.dag_processing.dagbag

    import tidegate.dags.batch_dag
    import tidegate.jobs.registry

    tidegate.jobs.registry.pipeline_names()
if runs_tasks:
    import grpc._channel  # what grpc and Airflow import when they are first used
    import jinja2.ext
    import pyspark.sql.connect.session

    import tidegate.jobs.engine.worker
