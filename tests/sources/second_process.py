"""Runs file pipelines in a separate process, as Airflow's tasks do: `python -m tests.sources.second_process`.

It reads the pickled settings from standard input. Each process does the same steps, so that all send the same requests to
Spark's server.
"""

import pickle
import sys
from typing import Any, Literal

from tidegate.jobs import Files, Pipeline, State, Sum
from tidegate.jobs.aggregates import Count
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings

# Parquet stores the number exactly as declared, so that Spark's own reader reads it.
SCHEMA = {"name": "string", "amount": "int"}
STATE = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")}, kind="opaque")


def positive(rows: Any) -> Any:
    return rows.where("amount > 0")


def pipeline_over(format: Literal["parquet", "csv"], transform: Any) -> Pipeline:
    source = Files(format, format=format, schema=SCHEMA, kind="opaque", done_folder=f"done/{format}")
    return Pipeline(format, source, {f"{format}_sums": STATE}, transform)


# The first plan of the first pipeline is the same in each process, even in the numbers of its parts; later plans differ.
PIPELINES = [pipeline_over("parquet", positive), pipeline_over("csv", None)]

if __name__ == "__main__":
    settings: Settings = pickle.load(sys.stdin.buffer)
    for pipeline in PIPELINES:
        run_pipeline(settings, pipeline, run_id=sys.argv[1])
