"""Every kind of source and state, and a source whose batches a test chooses.

The source is a list of numbered records. A batch is a range of it, so that the expected result is known without the ledger:
the ranges of the committed batches lie end to end, and Python computes the states from the records in them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from operator import xor
from typing import Any

import pytest
import sqlalchemy as sa

from tests import store as ledger
from tests.batches import Row, Stream, end_of, plan_again, stage, staging_cursor
from tests.integration.conftest import owner, waiting
from tidegate.jobs import Avg, BitXor, CollectSet, Count, Histogram, Last, Max, Min, Pipeline, Rows, State, Sum
from tidegate.jobs.aggregates import Aggregate
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import AttemptNotSealed, Unprocessed

__all__ = ["owner", "waiting"]  # fixtures
# A record: its key and its amount, either of which may be missing. A negative amount makes it a bad record.
Record = tuple[str | None, int | None]
AGGREGATES: dict[str, Aggregate] = {
    "records": Count(),
    "known": Count("amount"),
    "total": Sum("amount"),
    "least": Min("amount"),
    "most": Max("amount"),
    "mean": Avg("amount", digits=3),
    "bits": BitXor("amount"),
    "last": Last("amount", "bigint", {"key": "text"}),
    "amounts": CollectSet("amount", "bigint", most=10_000),
    "shares": Histogram("amount", [0, 5]),
}


def declare(source: ledger.SourceKind, state: ledger.StateKind | None = None, **changes: Any) -> Pipeline:
    """Declare a pipeline with a keyed state, whose key may be NULL, a global one, and one of all records."""
    keyed = State(key={"key": "text"}, aggregates=AGGREGATES, null_keys=True, kind=state or source)
    overall = State(aggregates=AGGREGATES, kind=keyed.kind)
    states = {"per_key": keyed, "overall": overall, "log": Rows({"key": "text", "amount": "bigint"})}
    return Pipeline(**{"name": "flow", "source": Stream(source), "states": states, "guarantee": "at_least_once"} | changes)


def fold(records: Sequence[Record]) -> dict[str | None, Row]:
    return {key: fold_all(found) for key, found in _per_key(records).items()}


def fold_all(records: list[Record]) -> Row:
    kept = _kept(records)
    count = kept["mean_count"]
    kept["mean"] = (Decimal(kept["mean_sum"]) / count).quantize(Decimal("0.001"), ROUND_HALF_UP) if count else None
    return tuple(kept[name] for name in AGGREGATES)


def _per_key(records: Sequence[Record]) -> dict[str | None, list[Record]]:
    return {key: [record for record in records if record[0] == key] for key, _ in records}


def _kept(records: list[Record]) -> dict[str, Any]:
    known = [amount for _, amount in records if amount is not None]
    # NULL comes before all values, in the key as in the amount.
    last = max(records, key=lambda r: [(part is not None, part) for part in r], default=(None, None))
    return {
        "records": len(records),
        "known": len(known),
        "total": sum(known),
        "least": min(known, default=None),
        "most": max(known, default=None),
        "mean_sum": sum(known),
        "mean_count": len(known),
        "bits": reduce(xor, known) if known else None,
        "last_key": last[0],
        "last": last[1],
        "amounts": sorted(set(known)),
        "shares": [sum(n < 0 for n in known), sum(0 <= n < 5 for n in known), sum(n >= 5 for n in known)],
    }


def partial(records: list[Record]) -> Row:
    """Return what a task stages of these records; arrays as Postgres writes them."""
    return [f"{{{','.join(map(str, v))}}}" if isinstance(v, list) else v for v in _kept(records).values()]


def is_bad(record: Record) -> bool:
    return record[1] is not None and record[1] < 0


class Flow:
    """Moves batches through the real ledger as `tidegate.jobs.engine` does, with partials from Python instead of Spark."""

    def __init__(self, store: StateStore, owner: StateStore, spec: ledger.PipelineSpec, records: Sequence[Record] = ()) -> None:
        self.store, self.owner, self.settings = store, owner, store.settings
        self.spec = spec
        self.records = list(records)

    def plan(self, *sizes: int, run_id: str = "run") -> list[int] | None:
        """Open a batch of each size after the newest; None if another planner was first."""
        after = self.store.last_opened(self.spec.name)
        ends = [*accumulate(sizes, initial=end_of(after.metadata if after else None))]
        metadata = [ledger.encode_metadata({"start": start, "end": end}) for start, end in pairwise(ends)]
        return self.store.open_batches(self.spec, run_id, [], after, metadata)

    def next(self) -> int:
        last = self.store.last_opened(self.spec.name)
        (txid,) = self.plan(1, run_id=f"run {last.txid if last else 0}") or []
        return txid

    def take(self, txid: int, size: int | None = None, **how: Any) -> ledger.Attempt | ledger.Commit | ledger.NotStarted:
        """Take a batch's fence; if it has to be planned again, with this size, or up to its former end if None."""
        begun = self.store.start_attempt(self.spec, txid, "test", **how)
        while isinstance(begun, ledger.ReplanNeeded):
            new_input = ledger.NewInput(ledger.encode_metadata(plan_again(begun, size)), begun.continues)
            begun = self.store.start_attempt(self.spec, txid, "test", new_input=new_input, **how)
        return begun

    def start(self, txid: int, size: int | None = None, **how: Any) -> ledger.Attempt:
        attempt = self.take(txid, size, **how)
        assert isinstance(attempt, ledger.Attempt), attempt
        return attempt

    def stage(
        self, attempt: ledger.Attempt, staged: str | ledger.Staged, rows: Iterable[Row], *, partition: int = 0
    ) -> ledger.StagedPartition:
        spec: Any = self.spec.state(staged) if isinstance(staged, str) else staged
        return stage(self._staging, attempt, spec, rows, partition)

    @cached_property
    def _staging(self) -> Any:
        return staging_cursor(self.settings)

    def seal(self, attempt: ledger.Attempt, *staged: ledger.StagedPartition, tracked: ledger.Tracked | None = None) -> None:
        self.store.seal(attempt, staged, tracked or ledger.Tracked(0))

    def put(self, txid: int, /, *, mode: ledger.Mode = "resume", **rows: Iterable[Row]) -> ledger.Attempt:
        attempt = self.start(txid, mode=mode)
        self.seal(attempt, *(self.stage(attempt, state, own) for state, own in rows.items()))
        return attempt

    def merge(self, txid: int | None = None, /, *, redo: bool = False, **rows: Iterable[Row]) -> int:
        """Commit, or redo, a batch of these rows by state; without a txid, one that is planned now."""
        txid = txid or self.next()
        self.put(txid, mode="redo" if redo else "resume", **rows)
        if redo:
            self.owner.redo_batch(self.spec, txid, ledger.Redo("an operator", "it was wrong"))
        else:
            self.commit(txid)
        return txid

    def finish(self, attempt: ledger.Attempt) -> ledger.Attempt:
        records = self.read(attempt)
        bad = [record for record in records if is_bad(record)] if self.spec.quarantines else []
        good = [record for record in records if record not in bad]
        staged = [
            self.stage(attempt, "per_key", [(key, *partial(found)) for key, found in _per_key(good).items()]),
            self.stage(attempt, "overall", [partial(good)]),
            self.stage(attempt, "log", [(position, *record) for position, record in enumerate(good)]),
        ]
        if self.spec.quarantines:
            rows = [("it is negative", None, f"{key}:{amount}", True) for key, amount in bad]
            staged.append(self.stage(attempt, ledger.QuarantineSpec(self.spec.name), rows))
        self.seal(attempt, *staged, tracked=ledger.Tracked(len(records), hash(tuple(records)) >> 1, len(bad)))
        return attempt

    def read(self, attempt: ledger.Attempt) -> list[Record]:
        """Return the records that an attempt's metadata names; quarantined ones as a better parser would read them."""
        if ledger.QUARANTINED not in attempt.source_metadata:
            return self.records[attempt.source_metadata["start"] : attempt.source_metadata["end"]]
        taken = f"pipeline = '{self.spec.name}' AND replayed_txid = {attempt.txid}"
        payloads = self.by_hand(f"SELECT payload FROM tidegate.quarantine WHERE {taken} ORDER BY txid, number")
        return [(key, -int(amount)) for key, amount in (payload.split(":") for (payload,) in payloads)]

    def process(self, txid: int, size: int | None = None, **how: Any) -> ledger.Attempt | ledger.Commit | ledger.NotStarted:
        attempt = self.take(txid, size, **how)
        return self.finish(attempt) if isinstance(attempt, ledger.Attempt) else attempt

    def fail(self, txid: int, size: int | None = None, *, is_poison: bool = True) -> int:
        """Start an attempt that fails; return how many tries have failed by the batch's content."""
        return self.store.fail_attempt(self.start(txid, size, mode="restage"), "BROKEN: it broke.", is_poison=is_poison)

    def commit(self, txid: int) -> ledger.Commit:
        return self.store.commit_batch(self.spec, txid, "test")

    def complete(self, *txids: int) -> None:
        for txid in txids:
            self.process(txid)
            self.commit(txid)

    def settle(self, txid: int, size: int | None = None) -> ledger.Commit:
        """Commit a batch, processing it again where necessary."""
        try:
            return self.commit(txid)
        except (Unprocessed, AttemptNotSealed):
            self.process(txid, size, mode="restage")
            return self.commit(txid)

    def redo(self, txid: int, size: int | None = None) -> ledger.Commit:
        """Process the last committed batch again, and replace its effect by the result."""
        self.finish(self.start(txid, size, mode="redo"))
        return self.owner.redo_batch(self.spec, txid, ledger.Redo("an operator", "it was wrong"))

    def rows(self, state: str = "per_key") -> list[dict[str, Any]]:
        return list(self.store.state_rows(self.spec.state(state)))

    def state(self, state: str = "per_key") -> dict[str | None, tuple[Any, ...]]:
        return {row.get("key"): tuple(row[name] for name in AGGREGATES) for row in self.rows(state)}

    def ranges(self) -> list[tuple[int, int, bool]]:
        """Return start, end and whether it counts for each committed batch, except those of quarantined records."""
        statuses = [status for status in self.store.batch_statuses(self.spec.name, limit=10_000) if status.committed_at]
        of = [(self.metadata(status.txid), status.phase == "committed") for status in statuses]
        return [(read["start"], read["end"], counts) for read, counts in of if ledger.QUARANTINED not in read]

    def metadata(self, txid: int) -> ledger.SourceMetadata:
        return self.store.source_metadata(self.spec.name, txid)

    def quarantined(self) -> list[str]:
        return [row["payload"] for row in self.store.quarantined(self.spec.name)]

    def check(self) -> None:
        """Compare the states with Python's result; each record must be in exactly one committed batch."""
        ranges = self.ranges()
        assert [start for start, _, _ in ranges] == [0, *(end for _, end, _ in ranges)][: len(ranges)], ranges
        counted = [record for start, end, counts in ranges if counts for record in self.records[start:end]]
        if self.spec.quarantines:
            counted = [record for record in counted if not is_bad(record)]
        assert self.state() == fold(counted)
        assert Counter((row["key"], row["amount"]) for row in self.rows("log")) == Counter(counted)
        assert self.state("overall") == ({None: fold_all(counted)} if any(counts for *_, counts in ranges) else {})

    def by_hand(self, *statements: str | sa.Executable) -> list[Any]:
        """Run statements as the tables' owner who names the pipeline as the writer; return the rows of the last."""
        with self.owner.engine.begin() as connection:
            connection.execute(sa.select(sa.func.set_config("tidegate.writer", self.spec.name, True)))
            for statement in statements:
                done = connection.execute(sa.text(statement) if isinstance(statement, str) else statement)
            return [tuple(row) for row in done] if done.returns_rows else []


Flows = Callable[..., Any]
Begin = Callable[..., Flow]


@pytest.fixture
def flows(store: StateStore, owner: StateStore, register: Callable[..., None]) -> Flows:
    """A function that registers a pipeline, returns its flow, of this class, and plans some batches."""

    def begin(pipeline: Pipeline, kind: Callable[..., Flow] = Flow, *more: Any, sizes: Sequence[int] = ()) -> Flow:
        register(pipeline)
        flow = kind(store, owner, pipeline.spec, *more)
        if sizes:
            flow.plan(*sizes)
        return flow

    return begin


@pytest.fixture
def flow(flows: Flows) -> Begin:
    """A function that registers a pipeline of a kind over these records, and returns its flow with batches of these sizes."""
    return lambda kind, records=(), *sizes, **changes: flows(declare(kind, **changes), Flow, records, sizes=sizes)
