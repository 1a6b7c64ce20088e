"""With 100 pipelines and 100,000 txids in one of them, every answer is small and every query reads few rows."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from tests.batches import Batches
from tests.page.conftest import Server, Visit
from tests.page.ledgers import PIPELINES, TXIDS, write_large_ledger
from tests.page.pipelines import CLICKS
from tests.store import (
    BatchFilter,
    LedgerReader,
    Moment,
    batch_details,
    batch_search,
    batch_status,
    moment,
    pipeline_overview,
    quarantined_records,
    timeline,
)
from tidegate.state_store import StateStore

LARGE = "large_1"
PAGE = [f"large_{number}" for number in range(1, 51)]
MIDDLE = TXIDS // 2
IN_AIRFLOW = [{"attempt": 1, "airflow_run_id": "a run", "airflow_task_id": "batch.process", "airflow_try": 1}]


@pytest.fixture(scope="module")
def large(server: Server) -> Server:
    with StateStore.connect(server.settings) as store:
        batches = Batches(store, CLICKS)
        batches.plan("a run", 1)
        batches.seal(1)
        batches.commit(1)
    write_large_ledger(server.settings, others=500)
    return server


@contextmanager
def explained(connection: sa.Connection) -> Iterator[list[tuple[int, str]]]:
    """Collect how many rows each statement of the block reads from tables and indexes, with the statement."""
    read: list[tuple[int, str]] = []

    def explain(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        raw = connection.connection.driver_connection
        with raw.cursor() as cursor:
            cursor.execute(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {statement}", parameters)
            read.append((_rows_read(cursor.fetchone()[0][0]["Plan"]), statement))

    sa.event.listen(connection, "before_cursor_execute", explain)
    try:
        yield read
    finally:
        sa.event.remove(connection, "before_cursor_execute", explain)


def _rows_read(plan: dict[str, Any]) -> int:
    """Return the rows that the scans of a plan look at, also those that they drop."""
    here = 0
    if "Scan" in plan["Node Type"]:
        dropped = plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
        here = int((plan["Actual Rows"] + dropped) * plan["Actual Loops"])
    return here + sum(map(_rows_read, plan.get("Plans", ())))


# What the page's routes read, and how many rows that may take: a small multiple of what they show. A bitmap of an index counts
# each row twice.
READS: dict[str, tuple[int, Callable[[Moment], object]]] = {
    "names": (500, lambda m: pipeline_overview.pipeline_names(m.connection)),
    "overview of 50 pipelines": (40_000, lambda m: pipeline_overview.progress(m.connection, PAGE)),
    "why 50 pipelines wait": (5_000, lambda m: m.waits(dict.fromkeys(PAGE))),
    "one pipeline": (1_000, lambda m: pipeline_overview.progress_of(m.connection, LARGE)),
    "why one batch waits": (500, lambda m: m.waits({LARGE: TXIDS})),
    "newest batches": (60_000, lambda m: batch_search.search(m.connection, LARGE, BatchFilter(), None, 50)),
    "batches in the middle": (60_000, lambda m: batch_search.search(m.connection, LARGE, BatchFilter(), MIDDLE, 50)),
    "a rare phase": (80_000, lambda m: batch_search.search(m.connection, LARGE, BatchFilter(phase="skipped"), None, 50)),
    "timeline": (5_000, lambda m: timeline(m.connection, LARGE, None, 100)),
    "timeline in the middle": (5_000, lambda m: timeline(m.connection, LARGE, MIDDLE, 100)),
    "one batch": (100, lambda m: batch_status.batch_history(m.connection, LARGE, MIDDLE)),
    "its tasks": (100, lambda m: batch_details.tasks(m.connection, LARGE, MIDDLE, IN_AIRFLOW)),
    "quarantine": (100, lambda m: quarantined_records.page_of_records(m.connection, LARGE, None, (MIDDLE, 1), 50)),
    "counts of quarantine": (100, lambda m: quarantined_records.counts(m.connection, LARGE, None, limit=100)),
    "actions": (500, lambda m: batch_status.newest_actions(m.connection, LARGE)),
}


@pytest.mark.soak
def test_queries_read_few_rows(large: Server) -> None:
    """Each statement reads as many rows as it would with a few txids: an index leads to them."""
    for name, (limit, read) in READS.items():
        with (
            LedgerReader(large.settings) as reader,
            moment(reader, "a test", PAGE) as at,
            explained(at.connection) as statements,
        ):
            read(at)
        most, statement = max(statements)
        assert most <= limit, f"{name}: {most} rows: {statement}"


@pytest.mark.promise("decision:0056")
def test_answers_are_small(large: Server, visit: Visit) -> None:
    admin = visit("admin")
    first = admin.json("/pipelines")
    assert (first["total"], len(first["pipelines"])) == (PIPELINES + 3, 50)
    assert [row["name"] for row in admin.json("/pipelines", search="ARGE_10")["pipelines"]] == ["large_10", "large_100"]
    assert admin.json("/pipelines", search="%")["total"] == 0

    in_order = admin.json("/pipelines", limit=200)["pipelines"]
    assert len({row["name"] for row in in_order}) == PIPELINES + 3
    severities = [row["why"]["severity"] for row in in_order]
    assert (severities[0], severities[-1]) == ("error", "ok")
    assert severities == sorted(severities, key=["error", "warning", "info", "ok"].index)
    worst = admin.json("/pipelines", limit=2)["pipelines"]
    assert [row["why"]["severity"] for row in worst] == severities[:2]
    assert [row["name"] for row in worst] != sorted(row["name"] for row in in_order)[:2]

    for path in ("", "/batches", "/timeline", "/quarantine", f"/batches/{MIDDLE}"):
        assert len(json.dumps(admin.json(f"/pipelines/{LARGE}{path}"))) < 100_000, path
    detail = admin.json(f"/pipelines/{LARGE}")
    assert (detail["opened"], detail["pending"], sum(detail["phases"].values())) == (TXIDS, 20, 20)
    found, before = [], None
    for _ in range(20):
        page = admin.json(f"/pipelines/{LARGE}/batches", phase="skipped", before=before)
        found, before = found + page["batches"], page["next"]
        if before is None:
            break
    assert [batch["txid"] for batch in found] == [5]
