"""Batches that tests move through the real ledger without Spark: those without rows, and rows that a test stages itself."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from tests.store import (
    QUARANTINED,
    AirflowTry,
    Attempt,
    Commit,
    ReplanNeeded,
    SourceKind,
    SourceMetadata,
    Staged,
    StagedPartition,
    Tracked,
    copy_partition,
    digest_statement,
    encode_metadata,
    position_of,
    state_tables,
)
from tidegate.jobs import Pipeline
from tidegate.jobs.sources import Coordinator, Emitter, Source
from tidegate.state_store import Settings, StateStore

Row = Sequence[Any]
_task_attempts = count(100)


@dataclass(frozen=True)
class Stream(Source):
    """A source of any kind with numbered records; its batches are the ranges that a test chooses."""

    kind: SourceKind = "opaque"

    @property
    def identity(self) -> str:
        return "a test's records"

    def coordinator(self, settings: Settings) -> Coordinator:
        """Not used: tests plan their batches themselves."""
        raise NotImplementedError

    def emitter(self, spark: Any, settings: Settings) -> Emitter:
        """Not used: tests stage their partials themselves."""
        raise NotImplementedError


def stage(settings: Settings, attempt: Attempt, staged: Staged, rows: Iterable[Row], partition: int = 0) -> StagedPartition:
    """Copy rows into staging as a Spark task would, in the stager's role; nothing counts before the seal.

    A row has the columns in their order, as text that Postgres reads.
    """
    task_attempt = next(_task_attempts)
    table = state_tables.staging_table_of(staged, attempt.txid, attempt.number)
    content = io.BytesIO("".join(_csv_line([*row, task_attempt]) for row in rows).encode())
    conninfo = settings.conninfo(user=settings.pg_stager)
    digest = digest_statement(staged, attempt.txid, attempt.number)
    written, checksum = copy_partition(conninfo, table.name, list(table.c.keys()), content, task_attempt, digest)
    return StagedPartition(staged.name, partition, task_attempt, written, checksum)


def _csv_line(values: Row) -> str:
    """Write one row as staging's CSV: NULL is empty, everything else is quoted."""
    return ",".join("" if value is None else '"' + str(value).replace('"', '""') + '"' for value in values) + "\n"


def end_of(metadata: SourceMetadata | None) -> int:
    position = position_of(metadata)
    return position["end"] if position else 0


def plan_again(replan: ReplanNeeded, size: int | None) -> SourceMetadata:
    """Plan a batch again after its predecessor: with this size, or up to its former end, if None."""
    if QUARANTINED in replan.current:
        return {**replan.current, "source": position_of(replan.previous)}
    start = end_of(replan.previous)
    return {"start": start, "end": max(start, replan.current["end"]) if size is None else start + size}


class Batches:
    """Moves batches of one pipeline through the ledger."""

    def __init__(self, store: StateStore, pipeline: Pipeline) -> None:
        self.store = store
        self.spec = pipeline.spec
        self.name = pipeline.name

    def plan(self, run_id: str, count: int, *, awaits_ack: bool = False) -> list[int]:
        """Open `count` batches and give them to a run."""
        after = self.store.last_opened(self.name)
        metadata = [encode_metadata({"files": [], "number": number}) for number in range(count)]
        opened = self.store.open_batches(self.spec, run_id, [], after, metadata, awaits_ack=awaits_ack)
        assert opened is not None
        return opened

    def begin(self, txid: int, airflow: AirflowTry | None = None) -> Attempt:
        """Start an attempt."""
        attempt = self.store.start_attempt(self.spec, txid, "a test", airflow=airflow)
        assert isinstance(attempt, Attempt)
        return attempt

    def seal(self, txid: int, rows: int = 0, airflow: AirflowTry | None = None) -> None:
        """Process a batch."""
        self.store.seal(self.begin(txid, airflow), [], Tracked(rows))

    def fail(self, txid: int, error: str = "MALFORMED_RECORD: a.csv, line 3.") -> None:
        """Let a batch fail by its content, and halt it, as its task does after the last try."""
        self.store.fail_attempt(self.begin(txid), error, is_poison=True)
        self.store.halt_batch(self.name, txid, error)

    def give_up(self, txid: int) -> None:
        """Fail a batch permanently: its pipeline's policy gives it up."""
        self.store.fail_attempt(self.begin(txid), "MALFORMED_RECORD: a.csv, line 3.", is_poison=True)
        self.store.give_up(self.name, txid, "the pipeline's policy", "6 tries failed")

    def commit(self, txid: int) -> Commit:
        """Commit a batch that was processed or given up."""
        return self.store.commit_batch(self.spec, txid, "a test")
