"""Airflow imports this module in each of its processes at start; it warms those that fork.

LocalExecutor forks its workers from the scheduler, and the Dag processor forks for every file it parses: what the parent has
imported or looked up costs the child nothing. A task that uses Spark starts ten times faster. No connection may be
opened before a fork, and no pipeline imported, or a running scheduler would hide an author's edits.
"""

import gc
import sys

# Nearly everything that starting up makes is there to stay. To look for garbage less often takes 7 % off the CPU of imports.
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
