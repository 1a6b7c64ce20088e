"""The examples of docs/states.md, run as they stand, against plain Python over the raw data."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from jobs import Pipeline
from jobs.engine.local_run import run_pipeline
from state_store import Settings, StateStore

PAGE = Path(__file__).resolve().parents[2] / "docs" / "states.md"
REPORTS = [
    ("CS-TUA", 150, "2026-01-01T00:00:00Z", False),
    ("CS-TUB", 100, "2026-01-02T00:00:00Z", False),
    ("CS-TUA", 160, "2026-01-03T00:00:00Z", True),
    ("CS-TUA", 155, "2026-01-02T00:00:00Z", False),
    ("D-AIBA", 80, "2026-01-04T00:00:00Z", False),
]
CHECKS = ["about as many rows as before", "every plane has a tail number", "seats are possible", "the states agree"]


def examples() -> list[Pipeline]:
    """Return the pipelines that the page declares."""
    found = []
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        names: dict[str, Any] = {}
        exec(compile(block, str(PAGE), "exec"), names)
        found.append(names["PIPELINE"])
    return found


@pytest.fixture
def planes(settings: Settings, register: Callable[..., None]) -> dict[str, Pipeline]:
    """The page's pipelines, registered, with two files of reports and the table that one of them writes."""
    pipelines = {pipeline.name: pipeline for pipeline in examples()}
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


def test_the_examples_do_what_the_page_says(settings: Settings, planes: dict[str, Pipeline]) -> None:
    """Every kind of state, a pipeline that follows another, and an update."""
    for pipeline in planes.values():
        run_pipeline(settings, pipeline, run_id="run")

    def rows(pipeline: str, state: str) -> list[dict[str, Any]]:
        spec = planes[pipeline].spec.state(state)
        assert spec is not None
        with StateStore.connect(settings) as store:
            return list(store.state_rows(spec))

    (seats,) = rows("planes", "seats")
    assert (seats["reports"], seats["seats"]) == (5, sum(report[1] for report in REPORTS) / 5)
    newest = {tail: max(report for report in REPORTS if report[0] == tail) for tail, *_ in REPORTS}
    newest["CS-TUA"] = REPORTS[2]
    assert {row["tail"]: (row["seats"], row["gone"]) for row in rows("planes", "plane")} == {
        tail: (report[1], report[3]) for tail, report in newest.items()
    }
    assert sorted((row["tail"], row["seats"]) for row in rows("planes", "report")) == sorted(r[:2] for r in REPORTS)
    by_letter = {row["letter"]: row["seats"] for row in rows("seats_by_letter", "by_letter")}
    assert by_letter == {"C": 150 + 100 + 160 + 155, "D": 80}
    (total,) = rows("checked_planes", "checked_total")
    assert total["seats"] == sum(report[1] for report in REPORTS)
    with StateStore.connect(settings) as store, store.engine.connect() as connection:
        checks = [store.batch_history("checked_planes", txid).checks for txid in (1, 2)]
        assert [{check["name"]: check["found"] for check in found} for found in checks] == [dict.fromkeys(CHECKS)] * 2
        assert [tuple(row) for row in connection.execute(sa.text("SELECT * FROM mail.outbox"))] == [("CS-TUA", 1)]
