"""The examples of docs/inputs.md, run as they stand on real flights, against DuckDB over the raw data."""

import shutil
from collections.abc import Callable

import duckdb
import pandas as pd
import pytest

from tests.readme.pages import examples, flights_data, raw, rows
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings

DAYS = 3


@pytest.fixture
def flights(settings: Settings) -> pd.DataFrame:
    """Some days of flights, as files per day in two folders; planes and airlines beside them, as the package has them."""
    flights = raw("flights", nrows=DAYS * 1000)
    flights = flights[(flights["month"] == 1) & (flights["day"] <= DAYS)]
    for name in ("newark", "others", "planes", "airlines"):
        (settings.home / "data" / name).mkdir(parents=True)
    for (day, is_newark), rows_of in flights.groupby(["day", flights["origin"] == "EWR"]):
        folder = settings.home / "data" / ("newark" if is_newark else "others")
        rows_of.to_csv(folder / f"{day}.csv", index=False, na_rep="NA")
    for name in ("planes", "airlines"):
        shutil.copy(flights_data(name), settings.home / "data" / name)
    return flights


@pytest.mark.soak
def test_the_examples_do_what_the_page_says(settings: Settings, register: Callable[..., None], flights: pd.DataFrame) -> None:
    """A merge of two folders, and a join of both with two references."""
    pipelines = examples("inputs.md")
    register(*pipelines.values())
    for pipeline in pipelines.values():
        assert len(run_pipeline(settings, pipeline, run_id="run").commits) == DAYS  # Newark's files are one slice
    assert len(list((settings.home / "data/kept_planes").rglob("planes.csv"))) == 1

    database = duckdb.connect()
    for name, frame in (("flights", flights), ("planes", raw("planes")), ("airlines", raw("airlines"))):
        database.register(name, frame)
    merged = "SELECT carrier, count(*), sum(distance)::bigint FROM flights GROUP BY carrier ORDER BY carrier"
    assert rows(settings, pipelines["departures"], None) == database.execute(merged).fetchall()
    joined = """
        SELECT a.name, count(*), count(p.seats), coalesce(sum(p.seats), 0)::bigint,
               coalesce(sum(p.seats * f.distance), 0)::bigint
        FROM flights f LEFT JOIN planes p USING (tailnum) JOIN airlines a USING (carrier) GROUP BY a.name ORDER BY a.name
    """
    expected = database.execute(joined).fetchall()
    assert rows(settings, pipelines["seats"], None) == expected
    assert sum(row[1] for row in expected) == len(flights)
    assert 0 < sum(row[2] for row in expected) < len(flights)
