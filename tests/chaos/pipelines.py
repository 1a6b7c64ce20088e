"""Three small pipelines over files of a few rows.

Tasks of Airflow import this module, so it imports nothing of the tests' own surroundings.
"""

import random
from pathlib import Path
from typing import Any

from tidegate.jobs import Count, Files, Max, Min, Newest, Pipeline, Rows, State, Sum
from tidegate.jobs.aggregates import Aggregate
from tidegate.jobs.states import AnyState

GLOB = "*.csv"
OF_KEY: dict[str, Aggregate] = {"lines": Count(), "total": Sum("v")}
# A run of many small batches, which no Python worker stages; several states, with texts, which Spark's tasks stage; and a
# source and a state that are opaque.
DECLARED: dict[str, tuple[dict[str, Any], dict[str, AnyState]]] = {
    "many": ({}, {"many_sums": State({"k": "text"}, {**OF_KEY, "least": Min("v", "integer"), "most": Max("v", "integer")})}),
    "several": (
        {"max_files": 2},
        {
            "several_words": State({"k": "text"}, {"lines": Count(), "longest": Max("word", "text")}),
            "several_rows": Rows({"k": "text", "v": "integer", "word": "text"}),
            "several_newest": Newest({"k": "text"}, {"word": "text"}, {"v": "integer"}),
        },
    ),
    "opaque": (
        {"kind": "opaque"},
        {"opaque_sums": State({"k": "text"}, {**OF_KEY, "longest": Max("word", "text")}, kind="opaque")},
    ),
}
SCHEMA = {"k": "string", "v": "int", "word": "string"}
USUAL: dict[str, Any] = {"glob": GLOB, "format": "csv", "schema": SCHEMA, "min_age_seconds": 0}
PIPELINES = {
    name: Pipeline(name, Files(f"data/{name}", **USUAL, **arguments), states, retry_delay_seconds=1)
    for name, (arguments, states) in DECLARED.items()
}
FILES_PER_RUN = {"many": 40, "several": 6, "opaque": 4}


def file_count(home: Path, name: str) -> int:
    return sum(1 for _ in (home / "data" / name).glob(GLOB))


def add_files(home: Path, name: str) -> None:
    """Let the files of a pipeline's next run arrive, each whole: what is in a file depends on its number alone."""
    first = file_count(home, name)
    for number in range(first, first + FILES_PER_RUN[name]):
        chance = random.Random(f"{name} {number}")
        rows = [(chance.choice("abcdefghij"), chance.randrange(-99, 100), chance.choice("xyz")) for _ in range(1 + number % 20)]
        unfinished = home / "data" / name / f"{number:06d}.unfinished"
        unfinished.write_text("k,v,word\n" + "".join(f"{k},{v},{word}\n" for k, v, word in rows))
        unfinished.rename(unfinished.with_suffix(".csv"))
