"""The examples of docs/topologies.md, run as they stand on real data, against DuckDB over the same files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.readme.pages import names_of, raw, rows
from tests.store import LedgerReader, ask
from tidegate import sample_data
from tidegate.jobs import Pipeline
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings

DAYS = 4


@pytest.fixture
def home(settings: Settings) -> Path:
    """Some days of flights, a file a day, whose names are not in the order of the days; and licence texts."""
    flights = raw("flights", nrows=DAYS * 1000).convert_dtypes()
    folder = settings.home / "data" / "departures"
    folder.mkdir(parents=True)
    for day, of_day in flights[flights["day"] <= DAYS].groupby("day"):
        of_day.to_csv(folder / f"{(day * 3) % (DAYS + 1)}.csv", index=False, na_rep="NA")
    sample_data._licences(settings.home / "data" / "texts")
    return settings.home


@pytest.mark.soak
def test_the_examples_do_what_the_page_says(settings: Settings, register: Callable[..., None], home: Path) -> None:
    """Words per word, in all and by a query; the newest departure of each plane; a chain of two pipelines."""
    examples = names_of("topologies.md")
    pipelines: dict[str, Pipeline] = {names["PIPELINE"].name: names["PIPELINE"] for names in examples}
    register(*pipelines.values())
    for pipeline in pipelines.values():
        assert run_pipeline(settings, pipeline, run_id="run").commits

    def state(pipeline: str, name: str) -> list[tuple[Any, ...]]:
        return rows(settings, pipelines[pipeline], name)

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
