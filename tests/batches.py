"""Batches that tests move through the real ledger without Spark: those without rows, and rows that a test stages itself."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from tests import store as ledger
from tidegate.jobs import Pipeline
from tidegate.jobs.sources import Source
from tidegate.state_store import Settings, StateStore

Row = Sequence[Any]
_task_attempts = count(100)


@dataclass(frozen=True)
class Stream(Source):
    """A source of any kind with numbered records; tests plan its batches, of any range, and stage their partials themselves."""

    kind: ledger.SourceKind = "opaque"

    @property
    def identity(self) -> str:
        return "a test's records"


def stage(
    to: Settings | Any, attempt: ledger.Attempt, staged: ledger.Staged, rows: Iterable[Row], partition: int = 0
) -> ledger.StagedPartition:
    """Copy rows into staging as a Spark task would, in the stager's role, or by its cursor; nothing counts before the seal.

    A row has the columns in their order, as text that Postgres reads.
    """
    task_attempt = next(_task_attempts)
    table = ledger.state_tables.staging_table_of(staged, attempt.txid, attempt.number)
    content = io.BytesIO("".join(_csv_line([*row, task_attempt]) for row in rows).encode())
    digest = ledger.digest_statement(staged, attempt.txid, attempt.number)
    copy, to = (ledger.copy_partition, to.conninfo(user=to.pg_stager)) if isinstance(to, Settings) else (ledger.copy_rows, to)
    written, checksum = copy(to, table.name, list(table.c.keys()), content, task_attempt, digest)
    return ledger.StagedPartition(staged.name, partition, task_attempt, written, checksum)


def staging_cursor(settings: Settings) -> Any:
    """Return a cursor in the stager's role, for many partitions: a session of its own for each costs more than its rows."""
    connection = ledger.connect(settings.conninfo(user=settings.pg_stager))
    connection.autocommit = True
    return connection.cursor()


def _csv_line(values: Row) -> str:
    return ",".join("" if value is None else '"' + str(value).replace('"', '""') + '"' for value in values) + "\n"


def end_of(metadata: ledger.SourceMetadata | None) -> int:
    position = ledger.position_of(metadata)
    return position["end"] if position else 0


def plan_again(replan: ledger.ReplanNeeded, size: int | None) -> ledger.SourceMetadata:
    """Plan a batch again after its predecessor: with this size, or up to its former end, if None."""
    if ledger.QUARANTINED in replan.current:
        return {**replan.current, "source": ledger.position_of(replan.previous)}
    start = end_of(replan.previous)
    return {"start": start, "end": max(start, replan.current["end"]) if size is None else start + size}


class Batches:
    """Moves batches of one pipeline through the ledger."""

    def __init__(self, store: StateStore, pipeline: Pipeline) -> None:
        self.store = store
        self.spec = pipeline.spec
        self.name = pipeline.name

    def plan(self, run_id: str, count: int) -> list[int]:
        after = self.store.last_opened(self.name)
        metadata = [ledger.encode_metadata({"files": [], "number": number}) for number in range(count)]
        opened = self.store.open_batches(self.spec, run_id, [], after, metadata, awaits_ack=False)
        assert opened is not None
        return opened

    def begin(self, txid: int) -> ledger.Attempt:
        attempt = self.store.start_attempt(self.spec, txid, "a test")
        assert isinstance(attempt, ledger.Attempt)
        return attempt

    def seal(self, *txids: int) -> None:
        for txid in txids:
            self.store.seal(self.begin(txid), [], ledger.Tracked(0))

    def fail(self, txid: int, error: str = "MALFORMED_RECORD: a.csv, line 3.") -> None:
        """Let a batch fail by its content, and halt it, as its task does after the last try."""
        self.store.fail_attempt(self.begin(txid), error, is_poison=True)
        self.store.halt_batch(self.name, txid, error)

    def give_up(self, txid: int) -> None:
        """Fail a batch permanently: its pipeline's policy gives it up."""
        self.store.fail_attempt(self.begin(txid), "MALFORMED_RECORD: a.csv, line 3.", is_poison=True)
        self.store.give_up(self.name, txid, "the pipeline's policy", "6 tries failed")

    def commit(self, txid: int) -> ledger.Commit:
        return self.store.commit_batch(self.spec, txid, "a test")
