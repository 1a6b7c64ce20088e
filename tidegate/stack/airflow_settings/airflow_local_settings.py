"""Airflow imports this module in each of its processes at start; only the scheduler does something with it.

LocalExecutor forks its workers from the scheduler, so what the scheduler has imported costs its tasks nothing: a task that
uses Spark starts ten times faster. Import only: no connection may be opened before the fork.
"""

import sys

if "scheduler" in sys.argv[1:2]:
    import pyspark.sql.connect.session

    import jobs.phases  # noqa: F401
