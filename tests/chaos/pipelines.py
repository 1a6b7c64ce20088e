"""Three small pipelines over files of a few rows, and what plain Python computes from the same files.

Tasks of Airflow import this module, so it imports nothing of the tests' own surroundings.
"""

import csv
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg2

from tidegate.jobs import Count, Files, Max, Min, Newest, Pipeline, Rows, State, Sum
from tidegate.jobs.aggregates import Aggregate
from tidegate.jobs.states import AnyState

Row = tuple[str, int, str]
SCHEMA = {"k": "string", "v": "int", "word": "string"}
GLOB = "*.csv"


def _files(name: str, **arguments: Any) -> Files:
    return Files(f"data/{name}", glob=GLOB, format="csv", schema=SCHEMA, min_age_seconds=0, **arguments)


# A run of many small batches, which no Python worker stages; several states, with texts, which Spark's tasks stage; and a
# source and a state that are opaque.
MANY: dict[str, Aggregate] = {"lines": Count(), "total": Sum("v"), "least": Min("v", "integer"), "most": Max("v", "integer")}
OPAQUE: dict[str, Aggregate] = {"lines": Count(), "total": Sum("v"), "longest": Max("word", "text")}
SEVERAL: dict[str, AnyState] = {
    "several_words": State({"k": "text"}, {"lines": Count(), "longest": Max("word", "text")}),
    "several_rows": Rows({"k": "text", "v": "integer", "word": "text"}),
    "several_newest": Newest({"k": "text"}, {"word": "text"}, {"v": "integer"}),
}
DECLARED = (
    Pipeline("many", _files("many"), {"many_sums": State({"k": "text"}, MANY)}, retry_delay_seconds=1),
    Pipeline("several", _files("several", max_files=2), SEVERAL, retry_delay_seconds=1),
    Pipeline(
        "opaque",
        _files("opaque", kind="opaque"),
        {"opaque_sums": State({"k": "text"}, OPAQUE, kind="opaque")},
        retry_delay_seconds=1,
    ),
)
PIPELINES = {pipeline.name: pipeline for pipeline in DECLARED}
FILES_PER_RUN = {"many": 40, "several": 6, "opaque": 4}
FOUND = {
    "many_sums": "SELECT k, lines, total, least, most FROM state.many_sums",
    "several_words": "SELECT k, lines, longest FROM state.several_words",
    "several_rows": "SELECT k, v, word FROM state.several_rows",
    "several_newest": "SELECT k, v, word FROM state.several_newest",
    "opaque_sums": "SELECT k, lines, total, longest FROM state.opaque_sums",
}
# By pipeline: what counts the rows of the source in its states.
COUNTED = {
    "many": {"many_sums": "sum(lines)"},
    "several": {"several_words": "sum(lines)", "several_rows": "count(*)"},
    "opaque": {"opaque_sums": "sum(lines)"},
}


def file_count(home: Path, name: str) -> int:
    """Return how many files of a pipeline have arrived."""
    return sum(1 for _ in (home / "data" / name).glob(GLOB))


def add_files(home: Path, name: str, count: int) -> None:
    """Let the next files of a pipeline arrive, each whole: what is in a file depends on its number alone."""
    first = file_count(home, name)
    for number in range(first, first + count):
        chance = random.Random(f"{name} {number}")
        rows = [(chance.choice("abcdefghij"), chance.randrange(-99, 100), chance.choice("xyz")) for _ in range(1 + number % 20)]
        unfinished = home / "data" / name / f"{number:06d}.unfinished"
        unfinished.write_text("k,v,word\n" + "".join(f"{k},{v},{word}\n" for k, v, word in rows))
        unfinished.rename(unfinished.with_suffix(".csv"))


def wanted(home: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Compute all states from the files, each in the order of its rows."""
    many, several, opaque = (_rows(home / "data" / name) for name in ("many", "several", "opaque"))
    computed: dict[str, list[Any]] = {
        "many_sums": [(k, len(vs), sum(vs), min(vs), max(vs)) for k, vs in _by_key(many, 1).items()],
        "several_words": [(k, len(words), max(words)) for k, words in _by_key(several, 2).items()],
        "several_rows": list(several),
        "several_newest": [max(row for row in several if row[0] == k) for k in _by_key(several, 0)],
        "opaque_sums": [
            (k, len(vs), sum(vs), max(words))
            for (k, vs), words in zip(_by_key(opaque, 1).items(), _by_key(opaque, 2).values(), strict=True)
        ],
    }
    return {state: sorted(rows) for state, rows in computed.items()}


def found(connection: psycopg2.extensions.connection) -> dict[str, list[tuple[Any, ...]]]:
    """Return what Postgres has, in the same order."""
    states = {}
    with connection, connection.cursor() as cursor:
        for state, query in FOUND.items():
            cursor.execute(query)
            states[state] = sorted(cursor.fetchall())
    return states


def difference(found_rows: Sequence[tuple[Any, ...]], wanted_rows: Sequence[tuple[Any, ...]]) -> str | None:
    """Return how a state differs from what it should be, with a few rows of each kind; None if it does not."""
    more, less = Counter(found_rows) - Counter(wanted_rows), Counter(wanted_rows) - Counter(found_rows)
    if not more and not less:
        return None
    return f"{more.total()} rows too many, such as {list(more)[:3]}; {less.total()} missing, such as {list(less)[:3]}"


def _rows(folder: Path) -> list[Row]:
    rows: list[Row] = []
    for file in sorted(folder.glob(GLOB)):
        with file.open(newline="") as lines:
            rows += [(row["k"], int(row["v"]), row["word"]) for row in csv.DictReader(lines)]
    return rows


def _by_key(rows: Sequence[Row], column: int) -> dict[str, list[Any]]:
    keys: dict[str, list[Any]] = {}
    for row in rows:
        keys.setdefault(row[0], []).append(row[column])
    return keys
