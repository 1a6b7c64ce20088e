"""The examples of docs/windows.md, run as they stand over real departures, against DuckDB."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import duckdb
import pandas as pd
import pytest
from click.testing import CliRunner, Result

from tests.readme.pages import dicts, examples, raw
from tidegate.commands.act import quarantine_verbs
from tidegate.commands.show import inspect_verbs
from tidegate.jobs import Pipeline
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore

# Files in the order in which they come: the parts of 1 January 2013 by their scheduled hours. Some hours come much later.
PARTS = [(0, 7), (7, 10), (14, 16), (10, 14), (20, 24), (16, 20)]
# What counts, by the rule of the page: a row is judged by the greatest time of the files before its own.
JUDGED = """
CREATE VIEW judged AS
WITH marks AS (
    SELECT file, max(max("at")) OVER (ORDER BY file ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS mark
    FROM departures GROUP BY file
)
SELECT *, date_trunc('hour', "at") AS hour, hour + INTERVAL 1 HOUR AS ended,
       coalesce(ended <= mark - INTERVAL 3 HOUR, false) AS is_late, coalesce(ended <= mark, false) AS corrects
FROM departures JOIN marks USING (file)
"""
BY_HOUR = """
SELECT origin, hour, count(*), sum(delay), count(delay), max("at"), count(DISTINCT file) FILTER (WHERE corrects)
FROM judged WHERE NOT is_late GROUP BY ALL
"""
RUSH = """
SELECT start, count(*) FROM (
    SELECT time_bucket(INTERVAL 15 MINUTE, "at") - INTERVAL 15 MINUTE * unnest(range(4)) AS start FROM departures
) GROUP BY ALL
"""
DUTIES = """
WITH gaps AS (
    SELECT tail, "at", delay,
           coalesce("at" - lag("at") OVER (PARTITION BY tail ORDER BY "at") >= INTERVAL 10 HOUR, true) AS begins FROM departures
), numbered AS (
    SELECT *, sum(begins::int) OVER (PARTITION BY tail ORDER BY "at", begins DESC ROWS UNBOUNDED PRECEDING) AS duty FROM gaps
)
SELECT tail, min("at"), max("at") + INTERVAL 10 HOUR, count(*), max(delay) FROM numbered GROUP BY tail, duty
"""


def departures() -> pd.DataFrame:
    """Return the departures of 1 January 2013 with the number of the file in which each comes; local times are read as UTC."""
    columns = ["month", "day", "dep_time", "sched_dep_time", "dep_delay", "tailnum", "origin"]
    flights = raw("flights", usecols=columns, nrows=2000)
    flights = flights[(flights.month == 1) & (flights.day == 1)].dropna(subset=["dep_time", "tailnum"])
    time, scheduled = flights.dep_time.astype(int), flights.sched_dep_time // 100
    at = pd.Timestamp("2013-01-01") + pd.to_timedelta(time // 100, "h") + pd.to_timedelta(time % 100, "min")
    file = scheduled.map(lambda hour: next(number for number, (first, end) in enumerate(PARTS) if first <= hour < end))
    found = {"origin": flights.origin, "tail": flights.tailnum, "at": at, "delay": flights.dep_delay.astype(int), "file": file}
    return pd.DataFrame(found)


@pytest.fixture
def pipelines(settings: Settings, register: Callable[..., None]) -> dict[str, Pipeline]:
    """The page's pipelines, registered, over the files."""
    found = examples("windows.md")
    folder = settings.home / "data" / "departures"
    folder.mkdir(parents=True)
    for number, part in departures().groupby("file"):
        lines = part.drop(columns="file").to_csv(index=False, date_format="%Y-%m-%dT%H:%M:%SZ")
        (folder / f"{number}.csv").write_text(lines)
    register(*found.values())
    return found


@pytest.mark.soak
def test_the_examples_do_what_the_page_says(
    settings: Settings, pipelines: dict[str, Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of three kinds, late rows, final windows, and a pipeline that follows these."""
    for pipeline in pipelines.values():
        run_pipeline(settings, pipeline, run_id="run")
    raw = duckdb.connect()
    raw.register("departures", departures())
    raw.execute(JUDGED)

    def rows(pipeline: str, state: str) -> list[dict[str, Any]]:
        return dicts(settings, pipelines[pipeline], state)

    def expected(query: str) -> set[tuple[Any, ...]]:
        found = raw.execute(query).fetchall()
        return {tuple(v.replace(tzinfo=UTC) if isinstance(v, datetime) else v for v in row) for row in found}

    by_hour = rows("departures", "by_hour")
    names = ["origin", "window_start", "flights", "delay_sum", "delay_count", "last_event", "corrections"]
    assert {tuple(row[name] for name in names) for row in by_hour} == expected(BY_HOUR)
    for row in by_hour:
        mean = (Decimal(row["delay_sum"]) / row["delay_count"]).quantize(Decimal("0.01"), ROUND_HALF_UP)
        assert row["delay"] == mean
    assert any(row["corrections"] for row in by_hour)
    assert {(row["window_start"], row["flights"]) for row in rows("departures", "rush")} == expected(RUSH)
    names = ["tail", "window_start", "window_end", "flights", "worst"]
    assert {tuple(row[name] for name in names) for row in rows("departures", "duties")} == expected(DUTIES)

    late = expected("SELECT origin, hour, count(*) FROM judged WHERE is_late GROUP BY ALL")
    with StateStore.connect(settings) as store:
        records = list(store.quarantined("departures"))
        spec = pipelines["departures"].spec.states[0]
        progress = store.event_time(spec)
        assert store.lag(["departures"])[0].quarantined == 0
    assert late
    assert len(records) == len(late)
    assert {record["state"] for record in records} == {"by_hour"}
    assert progress is not None
    assert (progress.late, progress.txid) == (len(late), len(PARTS))
    final = {
        (row["origin"], row["window_start"], row["flights"])
        for row in by_hour
        if f"{row['window_end'].astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}" <= (progress.final_until or "")
    }
    assert {(row["origin"], row["hour"], row["flights"]) for row in rows("hourly_report", "reported")} == final
    assert final
    assert len(rows("hourly_report", "reported")) == len(final)

    for module in ("show.inspect_verbs", "act.quarantine_verbs"):
        monkeypatch.setattr(f"tidegate.commands.{module}.find_pipeline", pipelines.__getitem__)
        monkeypatch.setattr(f"tidegate.commands.{module}.Settings.load", lambda *_: settings)
    shown = CliRunner().invoke(inspect_verbs.inspect, ["departures", "--state", "by_hour"])
    assert f"Windows that ended until {progress.final_until} are final; {len(late)} partials came too late" in one_line(shown)
    shown = CliRunner().invoke(quarantine_verbs.list_records, ["departures"])
    assert "What the commits of by_hour have set aside stays here" in one_line(shown)
    (early,) = (row for row in by_hour if row["origin"] == "JFK" and row["window_start"].astimezone(UTC).hour == 8)
    found = CliRunner().invoke(inspect_verbs.get, ["departures", "by_hour", "JFK", "2013-01-01T08:00Z", "--json"])
    assert json.loads(found.stdout)[0]["row"]["flights"] == early["flights"]
    final_windows = CliRunner().invoke(inspect_verbs.changes, ["departures", "by_hour", "--json"])
    assert len(json.loads(final_windows.stdout)) == len(final)


def one_line(done: Result) -> str:
    """Return what a command has printed, without line ends."""
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())
