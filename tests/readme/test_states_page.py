"""The examples of docs/states.md and docs/state-size.md, run as they stand, against plain Python over the raw data."""

import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from tests.readme.pages import blocks, dicts, examples
from tidegate.jobs import Pipeline
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore

REPORTS = [
    ("CS-TUA", 150, "2026-01-01T00:00:00Z", False),
    ("CS-TUB", 100, "2026-01-02T00:00:00Z", False),
    ("CS-TUA", 160, "2026-01-03T00:00:00Z", True),
    ("CS-TUA", 155, "2026-01-02T00:00:00Z", False),
    ("D-AIBA", 80, "2026-01-04T00:00:00Z", False),
    ("CS-TUB", 120, "2026-01-05T00:00:00Z", False),
]
CHECKS = ["about as many rows as before", "every plane has a tail number", "seats are possible", "the states agree"]


@pytest.fixture
def planes(settings: Settings, register: Callable[..., None]) -> dict[str, Pipeline]:
    """The page's pipelines, registered, with two files of reports and the table that one of them writes."""
    pipelines = examples("states.md")
    folder = settings.home / "data" / "planes"
    folder.mkdir(parents=True)
    for number, part in enumerate([REPORTS[:3], REPORTS[3:]]):
        lines = [json.dumps(dict(zip(("tail", "seats", "at", "gone"), report, strict=True))) for report in part]
        (folder / f"{number}.json").write_text("\n".join(lines) + "\n")
    with StateStore.connect(settings, user=settings.pg_owner) as store, store.engine.begin() as connection:
        for statement in (
            "CREATE SCHEMA mail",
            "CREATE TABLE mail.outbox (tail text, txid bigint)",
            "GRANT USAGE ON SCHEMA mail TO tidegate",
            "GRANT INSERT ON mail.outbox TO tidegate",
            "GRANT SELECT ON mail.outbox TO tidegate",
        ):
            connection.execute(sa.text(statement))
    register(*pipelines.values())
    return pipelines


@pytest.mark.soak
def test_the_examples_do_what_the_page_says(settings: Settings, planes: dict[str, Pipeline]) -> None:
    """Every kind of state, a pipeline that follows another, and an update."""
    for pipeline in planes.values():
        run_pipeline(settings, pipeline, run_id="run")

    def rows(pipeline: str, state: str) -> list[dict[str, Any]]:
        return dicts(settings, planes[pipeline], state)

    (seats,) = rows("planes", "seats")
    assert (seats["reports"], seats["seats"]) == (6, round(sum(report[1] for report in REPORTS) / 6, 1))
    newest = {tail: max(report for report in REPORTS if report[0] == tail) for tail, *_ in REPORTS}
    newest["CS-TUA"], newest["CS-TUB"] = REPORTS[2], REPORTS[5]
    assert {row["tail"]: (row["seats"], row["gone"]) for row in rows("planes", "plane")} == {
        tail: (report[1], report[3]) for tail, report in newest.items()
    }
    assert sorted((row["tail"], row["seats"]) for row in rows("planes", "report")) == sorted(r[:2] for r in REPORTS)
    (sizes,) = rows("planes", "sizes")
    assert sizes["planes"] == 3
    assert abs(sizes["seats_p50"] - 120) <= 1.2
    assert abs(sizes["seats_p99"] - 160) <= 1.6
    history = [
        (row["tail"], row["at"].day, row["seats"], row["valid_to"] and row["valid_to"].day)
        for row in rows("planes", "plane_history")
    ]
    assert history == [
        ("CS-TUA", 1, 150, 2),
        ("CS-TUA", 2, 155, 3),
        ("CS-TUB", 2, 100, 5),
        ("CS-TUB", 5, 120, None),
        ("D-AIBA", 4, 80, None),
    ]
    (query,) = blocks("states.md", "sql")
    with StateStore.connect(settings) as store, store.engine.connect() as connection:
        assert sorted(map(tuple, connection.execute(sa.text(query)))) == [("CS-TUA", 155), ("CS-TUB", 100)]
    assert {row["seats"]: row["tail"] for row in rows("longest_tails", "longest")} == {
        report[1]: report[0] for report in REPORTS
    }
    by_letter = {row["letter"]: row["seats"] for row in rows("seats_by_letter", "by_letter")}
    assert by_letter == {"C": 150 + 100 + 160 + 155 + 120, "D": 80}
    by_seats = {row["seats"]: row["planes"] for row in rows("planes_by_seats", "by_seats") if row["planes"]}
    assert by_seats == Counter(report[1] for report in newest.values() if not report[3])
    (total,) = rows("checked_planes", "checked_total")
    assert total["seats"] == sum(report[1] for report in REPORTS)
    with StateStore.connect(settings) as store, store.engine.connect() as connection:
        checks = [store.batch_history("checked_planes", txid).checks for txid in (1, 2)]
        assert [{check["name"]: check["found"] for check in found} for found in checks] == [dict.fromkeys(CHECKS)] * 2
        assert [tuple(row) for row in connection.execute(sa.text("SELECT * FROM mail.outbox"))] == [("CS-TUA", 1)]


def test_rows_in_range_partitions_are_in_that_of_their_month(settings: Settings, register: Callable[..., None]) -> None:
    """Two batches of sales; what both have of a month is in one partition."""
    (pipeline,) = examples("state-size.md").values()
    folder = settings.home / "data" / "sales"
    folder.mkdir(parents=True)
    times = [datetime(2025, 12, 31, 23, 59, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 11, 27, tzinfo=UTC)]
    for number, sold_at in enumerate((times[:2], times[1:])):
        columns = {"shop": ["Lisbon", "Oslo"], "cents": [100, 200], "sold_at": sold_at}
        pq.write_table(pa.table(columns), folder / f"{number}.parquet")
    register(pipeline)
    run_pipeline(settings, pipeline, run_id="run")

    (spec,) = pipeline.spec.states
    with StateStore.connect(settings) as store, store.engine.connect() as connection:
        assert [row["sold_at"] for row in store.state_rows(spec)] == [*times[:2], *times[1:]]
        found = connection.execute(sa.text("SELECT tableoid::regclass::text, count(*) FROM state.sale GROUP BY 1"))
        assert dict(map(tuple, found)) == {'state."sale$20251201"': 1, 'state."sale$20260101"': 2, 'state."sale$20261101"': 1}
