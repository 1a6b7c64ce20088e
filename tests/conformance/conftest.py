"""Both Postgres versions that are promised, every kind of source and state, and a source whose batches a test cuts at will.

The source is a list of numbered records. A batch is a range of it, so that what must have counted can be told without the
ledger: the ranges of the committed batches lie end to end, and the states are what Python makes of the records in them.
"""

import io
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from jobs import Count, Max, Min, Pipeline, State, Sum
from jobs.sources import Coordinator, Emitter, Source
from state_store import Settings, StateStore, tables
from state_store.attempts import Attempt, Tracked
from state_store.batches import QUARANTINED, encode_metadata, position_of
from state_store.beginning import NewInput, NotStarted, ReplanNeeded
from state_store.commits import Commit
from state_store.copy_in import copy_partition
from state_store.declaration import PipelineSpec, QuarantineSpec, SourceKind, SourceMetadata, Staged, StateKind
from state_store.errors import AttemptNotSealed, StagingLost
from state_store.settings import STACK_FOLDER
from state_store.staging import StagedPartition, digest_statement
from tests.conftest import Server, migrated_database
from tidegate.stack import component
from tidegate.stack.component import reserve_port
from tidegate.stack.postgres import EmbeddedPostgres

DEBIANS_BINARIES = Path("/usr/lib/postgresql/15/bin")
EXACTLY_ONCE: list[tuple[SourceKind, StateKind]] = [
    ("transactional", "transactional"),
    ("transactional", "opaque"),
    ("opaque", "opaque"),
]
STATE_KINDS: list[StateKind] = ["transactional", "opaque", "non-transactional"]
_task_attempts = count(100)

# A record: its key and its amount, either of which may be missing. A negative amount makes it a bad record.
Record = tuple[str | None, int | None]
Row = Sequence[Any]


# both versions of Postgres


class DebiansPostgres(EmbeddedPostgres):
    """A cluster of the oldest version that is promised, PostgreSQL 15, with the binaries of Debian's package."""

    locale_options = ("--locale=C.UTF-8",)

    def _places(self, stack_folder: Path) -> tuple[Path, Path]:
        return DEBIANS_BINARIES, super()._places(stack_folder)[1]


@contextmanager
def running_postgres_15(home: Path, like: Settings) -> Iterator[Settings]:
    """Run a cluster of its own with roles, databases and passwords like the embedded one; it is deleted in the end."""
    folder = home / STACK_FOLDER
    secrets = like.home / STACK_FOLDER / "secrets"
    shutil.copytree(secrets, folder / "secrets")  # the same passwords, so that the session's Spark can stage here too
    with ExitStack() as held:
        cluster = DebiansPostgres(folder, reserve_port(None, held))
        try:
            cluster.initialize()
            server = component.start(cluster.component(), folder)
            try:
                assert component.wait_until(lambda: cluster.component().check() is None, 60), "PostgreSQL 15 does not start"
                cluster.bootstrap()
                yield replace(like, pg_port=cluster.port, pg_passfile=cluster.passfile)
            finally:
                server.send_signal(cluster.component().stop_signal)
                try:
                    server.wait(60)
                except subprocess.TimeoutExpired:
                    server.kill()
                    raise
        finally:
            cluster.delete()


# For a module's `pytestmark`: its tests run on the embedded server, and again on the oldest version that is promised.
BOTH_POSTGRES = pytest.mark.parametrize("server", ["postgres 18", "postgres 15"], indirect=True, scope="session")


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, stack: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The Postgres server of the session: the embedded one, unless a module asks for both."""
    if getattr(request, "param", "postgres 18") == "postgres 18":
        yield Server(stack)
        return
    if not (DEBIANS_BINARIES / "postgres").exists():
        pytest.skip(f"No PostgreSQL 15 in {DEBIANS_BINARIES}. Install it with: apt-get install postgresql-15")
    with running_postgres_15(tmp_path_factory.mktemp("postgres_15"), stack) as settings:
        yield Server(settings)


@pytest.fixture(scope="session")
def template(server: Server) -> Iterator[str]:
    """A migrated database on that server; this folder's own, because other folders keep to one server."""
    with migrated_database(server) as name:
        yield name


# pipelines of every kind over one source


@dataclass(frozen=True)
class Stream(Source):
    """A source of numbered records whose batches are whatever ranges a test cuts; of any kind."""

    kind: SourceKind = "opaque"

    @property
    def identity(self) -> str:
        """What is read."""
        return "a test's records"

    def coordinator(self, settings: Settings) -> Coordinator:
        """Not asked: tests cut their batches themselves."""
        raise NotImplementedError

    def emitter(self, spark: Any, settings: Settings) -> Emitter:
        """Not asked: tests stage their partials themselves."""
        raise NotImplementedError


AGGREGATES = {
    "records": Count(),
    "known": Count("amount"),
    "total": Sum("amount"),
    "least": Min("amount"),
    "most": Max("amount"),
}


def declare(source: SourceKind, state: StateKind, **changes: Any) -> Pipeline:
    """Declare a pipeline with a keyed state, whose key may be missing, and a global one, both of this kind."""
    states = {
        "per_key": State(key={"key": "text"}, aggregates=AGGREGATES, null_keys=True, kind=state),
        "overall": State(aggregates=AGGREGATES, kind=state),
    }
    return Pipeline(**{"name": "flow", "source": Stream(source), "states": states, "guarantee": "at_least_once"} | changes)


def fold(records: Iterable[Record]) -> dict[str | None, tuple[int, int, int, int | None, int | None]]:
    """Compute what `AGGREGATES` keeps per key, with nothing but Python."""
    amounts: dict[str | None, list[int | None]] = {}
    for key, amount in records:
        amounts.setdefault(key, []).append(amount)
    return {key: _folded(found) for key, found in amounts.items()}


def fold_all(records: Iterable[Record]) -> tuple[int, int, int, int | None, int | None]:
    """Compute what `AGGREGATES` keeps of all records, with nothing but Python."""
    return _folded([amount for _, amount in records])


def _folded(amounts: list[int | None]) -> tuple[int, int, int, int | None, int | None]:
    known = [amount for amount in amounts if amount is not None]
    return len(amounts), len(known), sum(known), min(known, default=None), max(known, default=None)


def is_bad(record: Record) -> bool:
    """Tell whether a record belongs into quarantine."""
    return record[1] is not None and record[1] < 0


# batches through the real ledger


class Flow:
    """Moves batches through the real ledger as `jobs.engine.phases` does, with partials that Python computes: no Spark."""

    def __init__(self, settings: Settings, spec: PipelineSpec, records: Sequence[Record] = ()) -> None:
        self.settings = settings
        self.spec = spec
        self.records = list(records)
        self.store = StateStore.connect(settings)
        self.owner = StateStore.connect(settings, user=settings.pg_owner)

    def die(self) -> None:
        """Lose all connections at once, as a process does that is killed."""
        connection = psycopg2.connect(**self.settings.conninfo(user="postgres"))
        with closing(connection), connection, connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self.store.close()
        self.owner.close()

    def plan(self, *sizes: int, run_id: str = "run") -> list[int] | None:
        """Open a batch of each size behind the newest; None if another planner was first."""
        after = self.store.last_opened(self.spec.name)
        start = end_of(after.metadata if after else None)
        metadata = []
        for size in sizes:
            metadata.append(encode_metadata({"start": start, "end": start + size}))
            start += size
        return self.store.open_batches(self.spec, run_id, [], after, metadata)

    def take(self, txid: int, size: int | None = None, **how: Any) -> Attempt | Commit | NotStarted:
        """Take a batch's fence; if it is to be cut anew, with this size, None: to where it ended before."""
        new_input: NewInput | None = None
        while True:
            begun = self.store.start_attempt(self.spec, txid, "test", new_input=new_input, **how)
            if not isinstance(begun, ReplanNeeded):
                return begun
            new_input = NewInput(encode_metadata(cut_anew(begun, size)), begun.continues)

    def start(self, txid: int, size: int | None = None, **how: Any) -> Attempt:
        """Take a batch's fence, which must be free to take."""
        attempt = self.take(txid, size, **how)
        assert isinstance(attempt, Attempt), attempt
        return attempt

    def stage(self, attempt: Attempt, staged: str | Staged, rows: Iterable[Row], *, partition: int = 0) -> StagedPartition:
        """Copy rows into staging as one Spark task would, in the stager's role; nothing counts before it is sealed."""
        spec = self.spec.state(staged) if isinstance(staged, str) else staged
        assert spec is not None
        task_attempt = next(_task_attempts)
        table = tables.staging_table_of(spec, attempt.txid, attempt.number)
        content = io.BytesIO("".join(_csv_line([*row, task_attempt]) for row in rows).encode())
        conninfo = self.settings.conninfo(user=self.settings.pg_stager)
        digest = digest_statement(spec, attempt.txid, attempt.number)
        written, checksum = copy_partition(conninfo, table.name, list(table.c.keys()), content, task_attempt, digest)
        return StagedPartition(spec.name, partition, task_attempt, written, checksum)

    def seal(self, attempt: Attempt, *staged: StagedPartition, tracked: Tracked | None = None) -> None:
        """Seal an attempt."""
        self.store.seal(attempt, staged, tracked or Tracked(0))

    def finish(self, attempt: Attempt) -> Attempt:
        """Stage what the attempt's records amount to, and seal it."""
        records = self.read(attempt)
        bad = [record for record in records if is_bad(record)] if self.spec.quarantines else []
        good = [record for record in records if record not in bad]
        staged = [
            self.stage(attempt, "per_key", [(key, *values) for key, values in fold(good).items()]),
            self.stage(attempt, "overall", [fold_all(good)]),
        ]
        if self.spec.quarantines:
            rows = [("it is negative", None, f"{key}:{amount}", True) for key, amount in bad]
            staged.append(self.stage(attempt, QuarantineSpec(self.spec.name), rows))
        self.seal(attempt, *staged, tracked=Tracked(len(records), hash(tuple(records)) >> 1, len(bad)))
        return attempt

    def read(self, attempt: Attempt) -> list[Record]:
        """Return the records that an attempt's metadata names; of quarantined ones, what a better parser makes of them."""
        if QUARANTINED not in attempt.source_metadata:
            return self.records[attempt.source_metadata["start"] : attempt.source_metadata["end"]]
        statement = "SELECT payload FROM tidegate.quarantine WHERE pipeline = %s AND replayed_txid = %s ORDER BY txid, number"
        connection = psycopg2.connect(**self.settings.conninfo(user=self.settings.pg_stager))
        with closing(connection), connection, connection.cursor() as cursor:
            cursor.execute(statement, [self.spec.name, attempt.txid])
            found = [payload.split(":") for (payload,) in cursor.fetchall()]
        return [(key, -int(amount)) for key, amount in found]

    def process(self, txid: int, size: int | None = None, **how: Any) -> Attempt | Commit | NotStarted:
        """Take the fence, stage and seal, unless the batch needs no attempt."""
        attempt = self.take(txid, size, **how)
        return self.finish(attempt) if isinstance(attempt, Attempt) else attempt

    def fail(self, txid: int, size: int | None = None, *, is_poison: bool = True) -> int:
        """Start an attempt that gives up; return how many tries the batch has failed by itself."""
        return self.store.fail_attempt(self.start(txid, size, mode="restage"), "BROKEN: it broke.", is_poison=is_poison)

    def commit(self, txid: int) -> Commit:
        """Commit a processed batch."""
        return self.store.commit_batch(self.spec, txid, "test")

    def settle(self, txid: int, size: int | None = None) -> Commit:
        """Commit a batch, processing it again where that is due: a failure in either phase repeats both."""
        try:
            return self.commit(txid)
        except (StagingLost, AttemptNotSealed):  # the latter: whoever processed it is dead
            self.process(txid, size, mode="restage")
            return self.commit(txid)

    def redo(self, txid: int, size: int | None = None) -> Commit:
        """Process the last committed batch again, and put the result in the place of what it did."""
        self.finish(self.start(txid, size, mode="redo"))
        return self.owner.redo_batch(self.spec, txid, "an operator", "it was wrong")

    def rows(self, state: str = "per_key") -> list[dict[str, Any]]:
        """Return a state's rows as the table has them."""
        spec = self.spec.state(state)
        assert spec is not None
        return list(self.store.state_rows(spec))

    def state(self, state: str = "per_key") -> dict[str | None, tuple[Any, ...]]:
        """Return a state's values per key."""
        return {row.get("key"): tuple(row[name] for name in AGGREGATES) for row in self.rows(state)}

    def ranges(self) -> list[tuple[int, int, bool]]:
        """Return what each committed batch reads, from where to where, and whether it counts; those of quarantine left out."""
        found = []
        for status in self.store.batch_statuses(self.spec.name, limit=10_000):
            if status.committed_at is not None:
                read = self.store.source_metadata(self.spec.name, status.txid)
                if QUARANTINED not in read:
                    found.append((read["start"], read["end"], status.phase == "committed"))
        return found

    def phases(self) -> list[str]:
        """Return the phase of every batch."""
        return [status.phase for status in self.store.batch_statuses(self.spec.name, limit=10_000)]

    def metadata(self, txid: int) -> SourceMetadata:
        """Return what a batch reads as of now."""
        return self.store.source_metadata(self.spec.name, txid)

    def quarantined(self) -> list[str]:
        """Return the payloads that wait in quarantine."""
        return [row["payload"] for row in self.store.quarantined(self.spec.name)]

    def check(self) -> None:
        """Compare the states with what Python makes of the records of the committed batches, each in exactly one of them."""
        ranges = self.ranges()
        assert [start for start, _, _ in ranges] == [0, *(end for _, end, _ in ranges)][: len(ranges)], ranges
        counted = [record for start, end, counts in ranges if counts for record in self.records[start:end]]
        if self.spec.quarantines:
            counted = [record for record in counted if not is_bad(record)]
        assert self.state() == fold(counted)
        assert self.state("overall") == ({None: fold_all(counted)} if any(counts for *_, counts in ranges) else {})


def end_of(metadata: SourceMetadata | None) -> int:
    """Return where the source stands after a batch."""
    position = position_of(metadata)
    return position["end"] if position else 0


def cut_anew(wanted: ReplanNeeded, size: int | None) -> SourceMetadata:
    """Cut a batch again behind the one before it: with this size, None: to where it ended, or empty if that is not there."""
    if QUARANTINED in wanted.current:
        return {**wanted.current, "source": position_of(wanted.previous)}
    start = end_of(wanted.previous)
    return {"start": start, "end": max(start, wanted.current["end"]) if size is None else start + size}


def _csv_line(values: Row) -> str:
    """Write one row as staging's CSV: NULL is empty, everything else is quoted."""
    return ",".join("" if value is None else '"' + str(value).replace('"', '""') + '"' for value in values) + "\n"


@pytest.fixture
def flow(settings: Settings, register: Callable[..., None]) -> Iterator[Callable[..., Flow]]:
    """A function that registers a pipeline of these kinds over these records and returns its flow."""
    opened: list[Flow] = []

    def begin(source: SourceKind, state: StateKind, records: Sequence[Record] = (), **changes: Any) -> Flow:
        pipeline = declare(source, state, **changes)
        register(pipeline)
        opened.append(Flow(settings, pipeline.spec, records))
        return opened[-1]

    yield begin
    for each in opened:
        each.close()
