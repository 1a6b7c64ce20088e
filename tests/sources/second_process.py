"""Runs file pipelines in a separate process, as Airflow's tasks do: `python -m tests.sources.second_process`.

It reads the pickled settings from standard input. Each process does the same steps, so that all send the same requests to
Spark's server.
"""

import os
import pickle
import sys
from typing import Any, Literal, get_args

from tidegate.jobs import Files, Pipeline, State, Sum
from tidegate.jobs.aggregates import Count
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings

Format = Literal["parquet", "csv", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)
USUAL = (("parquet", "transformed"), ("csv", "plain"))  # all others are left to `make soak`
# Parquet stores the number exactly as declared, so that Spark's own reader reads it.
SCHEMA = {"name": "string", "amount": "int"}


def positive(rows: Any) -> Any:
    return rows.where("amount > 0")


def pipelines() -> list[Pipeline]:
    """Return a pipeline per format, with and without a transform.

    The first plan of the first pipeline is the same in each process, even in the numbers of its parts; later plans differ.
    """
    return [
        Pipeline(
            name=f"{format}_{how}",
            source=Files(f"{format}_{how}", format=format, schema=SCHEMA, kind="opaque", done_folder=f"done/{format}_{how}"),
            states={
                f"{format}_{how}_sums": State(
                    key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")}, kind="opaque"
                )
            },
            transform=transform,
        )
        for format in FORMATS
        for how, transform in (("transformed", positive), ("plain", None))
        if os.environ.get("SOAK") or (format, how) in USUAL
    ]


if __name__ == "__main__":
    settings: Settings = pickle.load(sys.stdin.buffer)
    for pipeline in pipelines():
        run_pipeline(settings, pipeline, run_id=sys.argv[1])
