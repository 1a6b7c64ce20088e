"""Warms the Airflow processes that fork; Airflow imports this module in each of its processes.

LocalExecutor forks its workers from the scheduler, and the Dag processor forks for every file it parses: modules that the
parent has imported cost the child nothing, so a task that uses Spark starts much faster. No connection may be opened before a
fork, and no pipeline imported, or a running scheduler would hide an author's edits.
"""

import gc
import sys

# Nearly all objects created at start stay alive: collecting garbage less often makes imports cheaper.
gc.set_threshold(50_000)

if sys.argv[1:2] in (["scheduler"], ["dag-processor"]):
    import airflow.dag_processing.dagbag

    import dags.batch_dag
    import jobs.registry

    jobs.registry.pipeline_names()
if sys.argv[1:2] == ["scheduler"]:
    import grpc._channel  # what grpc and Airflow import when they are first used
    import jinja2.ext
    import pyspark.sql.connect.session

    import jobs.engine.worker
