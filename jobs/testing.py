"""Tests for authors: whether a source and an aggregate keep their promises, and which partials a pipeline makes of rows.

    check_source(lambda: MyFeed(...), spark, settings)      raises BrokenPromise, naming the promise and how it was broken
    check_aggregate(MyCombiner("a"), rows, settings)        raises BrokenPromise, if the order or split of rows matters
    partials(PIPELINE, rows)                                the partials of a batch of these rows, per state

`check_source` drives a source as the engine would, from its metadata alone, without ledger and Airflow. The author gives it a
`Feed`: the source, and a way to put rows where the source reads. All promises are checked by the rows that the source emits.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidegate.jobs.aggregates import Aggregate
from tidegate.jobs.compute.partials.aggregate_promises import AggregateBench, BrokenPromise
from tidegate.jobs.compute.partials.rows_to_partials import aggregate
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.sources import ORIGIN, PAYLOAD, REFUSAL, Coordinator, Source
from tidegate.jobs.sources.binding import coordinator_of, emitter_of
from tidegate.jobs.sources.inputs.read import merged
from tidegate.jobs.spark.task_errors import reported_in
from tidegate.jobs.state_queries import How, answered_by
from tidegate.state_store.attempt.attempts import Attempt
from tidegate.state_store.base.errors import DeclarationInvalid, TidegateError
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceKind, SourceMetadata
from tidegate.state_store.ledger.batches import encode_metadata
from tidegate.state_store.ledger.counted_files import TakenFile, files_in, may_be_same

MAX_BATCHES = 100
Rows = Counter[tuple[Any, ...]]


class NotPossible(Exception):
    """A feed cannot change or hide rows of its source; promises that need it are left out."""


class Feed(Protocol):
    """A source under test, with its input. Each promise is tried on a fresh feed."""

    @property
    def source(self) -> Source:
        """The source; its batches should be small, so that a few rows make several of them."""

    def put(self, count: int) -> list[tuple[Any, ...]]:
        """Add rows, all different, to the source's input; return them as the source emits them."""

    def change(self) -> None:
        """Change a row that was put, so that its batch cannot be replayed. Leave this out if that cannot happen."""
        raise NotPossible

    def hide(self) -> AbstractContextManager[None]:
        """Hide some of the rows that were put until the context ends. Leave this out if that cannot happen."""
        raise NotPossible


class Bench:
    """Drives a source batch after batch, as the engine would; every call starts from saved metadata."""

    def __init__(self, feed: Feed, spark: SparkSession, settings: Settings) -> None:
        self.feed = feed
        self.spark = spark
        self.settings = settings
        self._inputs: dict[int, SourceMetadata] = {}
        self._acked = 0

    def plan(self, previous: SourceMetadata | None = None, first_txid: int = 1) -> list[SourceMetadata]:
        """Return the metadata of all batches after the previous one, of one plan."""
        coordinator = self._coordinator()
        planned: list[SourceMetadata] = []
        for txid in range(first_txid, first_txid + MAX_BATCHES):
            if not coordinator.is_ready(txid):
                return planned
            metadata = coordinator.initialize_transaction(txid, previous, None)
            if metadata is None:
                return planned
            previous = self._inputs[txid] = _as_saved(metadata)
            planned.append(previous)
        raise BrokenPromise(f"there is an end: {MAX_BATCHES} batches were planned of a few rows, and the plan went on.")

    def plan_again(self, txid: int, previous: SourceMetadata | None, current: SourceMetadata) -> SourceMetadata | None:
        """Return the source's new metadata for a batch that is tried again."""
        metadata = self._coordinator().initialize_transaction(txid, previous, current)
        if metadata is None:
            return None
        self._inputs[txid] = _as_saved(metadata)
        return self._inputs[txid]

    def ack(self, txid: int, metadata: SourceMetadata) -> None:
        """Give the source the ack of a batch."""
        self._acked = max(self._acked, txid)
        self.feed.source.ack(Attempt("conformance", txid, 1, metadata), self.settings)

    def committed(self) -> int:
        """Return the last txid that was acked."""
        return self._acked

    def taken_files(self, names: Sequence[str], before_txid: int) -> Iterator[tuple[str, Sequence[TakenFile]]]:
        """Yield each name with its files in batches before a txid, as the ledger would."""
        taken = self._taken(before_txid)
        for name in names:
            yield name, [file for file in taken if file.name == name]

    def files_of_times(self, times: Collection[int], inodes: Collection[str], before_txid: int) -> Sequence[TakenFile]:
        """Return the files with these modification times in batches before a txid, as the ledger would."""
        return [file for file in self._taken(before_txid) if may_be_same(file, times, inodes)]

    def _taken(self, before_txid: int) -> list[TakenFile]:
        return [
            TakenFile(file["name"], file["sha256"], file["size"], file["mtime_ns"], txid, is_done, is_done, file.get("inode"))
            for txid, planned in self._inputs.items()
            if txid < before_txid
            for file in files_in(planned)
            for is_done in [txid <= self._acked]
        ]

    def note_times(self, files: Sequence[TakenFile]) -> None:
        """Ignore new modification times: the next plan reads such a file again."""

    def _coordinator(self) -> Coordinator:
        coordinator = coordinator_of(self.feed.source, self.settings)
        coordinator.look_back(self)
        return coordinator

    def emit(self, txid: int, metadata: SourceMetadata, number: int = 1) -> Rows:
        """Return the rows of one attempt at a batch, verified."""
        attempt = Attempt("conformance", txid, number, metadata)
        emitter = emitter_of(self.feed.source, self.spark, self.settings)
        rows: Rows = Counter()
        try:
            rows.update(tuple(row) for row in emitter.emit_batch(attempt, metadata).toLocalIterator())
            emitter.verify_batch(attempt, metadata)
        except Exception as error:
            if isinstance(error, TidegateError) or (explained := reported_in(error) or emitter.explain(error)) is None:
                raise
            raise explained from error
        return rows

    def emit_all(self, planned: Sequence[SourceMetadata], *, first_txid: int = 1, number: int = 1) -> list[Rows]:
        """Return the rows of consecutive batches, each under an attempt of this number."""
        return [self.emit(txid, metadata, number) for txid, metadata in enumerate(planned, start=first_txid)]

    def emit_planned_again(self, planned: Sequence[SourceMetadata]) -> tuple[Rows, SourceMetadata | None]:
        """Plan the batches from txid 1 on again; return their rows, and the last metadata."""
        rows, previous = Rows(), None
        for txid, metadata in enumerate(planned, start=1):
            again = self.plan_again(txid, previous, metadata)
            if again is None:
                raise BrokenPromise(f"a planned batch can always be planned again: batch {txid}, {metadata}, became None.")
            rows += self.emit(txid, again, number=2)
            previous = again
        return rows, previous

    def emit_new(self, previous: SourceMetadata | None, first_txid: int) -> Rows:
        """Return the rows of all batches after the previous one."""
        return sum(self.emit_all(self.plan(previous, first_txid), first_txid=first_txid), Rows())


Promise = Callable[[Bench], None]


def each_row_is_in_exactly_one_batch(bench: Bench) -> None:
    """Batches are disjoint and nothing is left out, over several plans, each from saved metadata alone."""
    put: Rows = Counter()
    got: Rows = Counter()
    previous, txid = None, 0
    for count in (3, 5, 1):
        put.update(bench.feed.put(count))
        for metadata in bench.plan(previous, txid + 1):
            txid += 1
            got += bench.emit(txid, metadata)
            previous = metadata
    _check_equal("each row is in exactly one batch", put, got)


def nothing_new_is_no_batch(bench: Bench) -> None:
    """A source without new rows plans nothing, even if asked again."""
    bench.feed.put(3)
    planned = bench.plan()
    for _ in range(2):
        if more := bench.plan(planned[-1], len(planned) + 1):
            raise BrokenPromise(f"nothing new is no batch: {more[0]} was planned after {planned[-1]}.")


def a_replay_has_the_identical_rows(bench: Bench) -> None:
    """A batch's rows follow from its metadata: later rows, and other attempts, change nothing."""
    bench.feed.put(4)
    planned = bench.plan()
    first = bench.emit_all(planned)
    bench.feed.put(3)
    for txid, (metadata, rows) in enumerate(zip(planned, first, strict=True), start=1):
        previous = planned[txid - 2] if txid > 1 else None
        if (again := bench.plan_again(txid, previous, metadata)) != metadata:
            raise BrokenPromise(f"a retry reuses its metadata: it was {metadata}, it became {again}.")
        _check_equal(f"a replay of batch {txid} has the identical rows", rows, bench.emit(txid, metadata, number=2))


def a_batch_that_is_planned_again_leaves_no_gap(bench: Bench) -> None:
    """However batch n is planned again, batch n + 1 continues after it: each row counts once (I12)."""
    put: Rows = Counter(bench.feed.put(4))
    abandoned = bench.plan()
    put.update(bench.feed.put(3))
    got, previous = bench.emit_planned_again(abandoned)
    got += bench.emit_new(previous, len(abandoned) + 1)
    _check_equal("a batch that is planned again leaves no gap", put, got)


def a_changed_row_is_noticed(bench: Bench) -> None:
    """A replay that would have other rows is refused, or has other rows, which the sums of row hashes reveal (I11)."""
    bench.feed.put(4)
    planned = bench.plan()
    before = bench.emit_all(planned)
    bench.feed.change()
    try:
        after = bench.emit_all(planned, number=2)
    except TidegateError:
        return
    if before == after:
        raise BrokenPromise("a changed row is noticed: the replay had the old rows, though one of them was changed.")


def what_is_hidden_stops_the_replay(bench: Bench) -> None:
    """A batch that cannot be read completely fails with a named error, and is complete again when all rows are back."""
    bench.feed.put(4)
    planned = bench.plan()
    before = bench.emit_all(planned)
    refused = 0
    with bench.feed.hide():
        for txid, metadata in enumerate(planned, start=1):
            try:
                _check_equal(f"batch {txid} is whole or fails", before[txid - 1], bench.emit(txid, metadata, number=2))
            except TidegateError:
                refused += 1
    if not refused:
        raise BrokenPromise("what is hidden stops the replay: something was hidden, and no batch missed it.")
    after = bench.emit_all(planned, number=3)
    if before != after:
        raise BrokenPromise("what was hidden comes back: the replay had other rows than before.")


def what_is_hidden_comes_in_a_later_batch(bench: Bench) -> None:
    """A batch is planned again without its hidden rows; a later batch has them, exactly once (I12)."""
    put: Rows = Counter(bench.feed.put(6))
    planned = bench.plan()
    with bench.feed.hide():
        got, previous = bench.emit_planned_again(planned)
    if got == put:
        raise BrokenPromise("what is hidden cannot be read: something was hidden, and no batch missed it.")
    got += bench.emit_new(previous, len(planned) + 1)
    _check_equal("what is hidden comes in a later batch", put, got)


def callbacks_may_come_again(bench: Bench) -> None:
    """Ack and fail may be called repeatedly, and late: the source emits the same rows as without these calls."""
    bench.feed.put(4)
    planned = bench.plan()
    source = bench.feed.source
    first = bench.emit_all(planned)
    for txid, metadata in [*enumerate(planned, start=1), (1, planned[0])]:
        attempt = Attempt("conformance", txid, 1, metadata)
        source.fail(attempt, RuntimeError("a failed attempt"), bench.settings)
        bench.ack(txid, attempt.source_metadata)
        bench.ack(txid, attempt.source_metadata)
    if source.kind == "transactional":
        _check_equal("a batch can be read after its ack", first[0], bench.emit(1, planned[0], number=2))
    put = Counter(bench.feed.put(2))
    _check_equal("rows that come after an ack are read once", put, bench.emit_new(planned[-1], len(planned) + 1))


def records_are_the_rows(bench: Bench) -> None:
    """`emit_records` has the rows of `emit_batch`, none refused here, and `row_schema` has their columns."""
    bench.feed.put(3)
    metadata = bench.plan()[0]
    attempt = Attempt("conformance", 1, 1, metadata)
    emitter = emitter_of(bench.feed.source, bench.spark, bench.settings)
    rows = emitter.emit_batch(attempt, metadata)
    records = emitter_of(bench.feed.source, bench.spark, bench.settings).emit_records(attempt, metadata)
    declared = bench.spark.createDataFrame([], emitter.row_schema()).schema
    columns, expected = ([(c.name, c.dataType) for c in schema] for schema in (rows.schema, declared))
    if columns != expected:
        raise BrokenPromise(f"row_schema has the columns: it says {expected}, the rows have {columns}.")
    refused = records.where(f"{REFUSAL} IS NOT NULL").count()
    if refused:
        raise BrokenPromise(f"good rows are not refused: {refused} of them were.")
    plain = records.drop(ORIGIN, REFUSAL, PAYLOAD)
    _check_equal("records are the rows", Counter(map(tuple, rows.collect())), Counter(map(tuple, plain.collect())))


def _named(*promises: Promise) -> dict[str, Promise]:
    return {promise.__name__: promise for promise in promises}


BASIC = _named(each_row_is_in_exactly_one_batch, nothing_new_is_no_batch)
FURTHER = _named(callbacks_may_come_again, records_are_the_rows)
PROMISES: Mapping[SourceKind, Mapping[str, Promise]] = {
    "transactional": {
        **BASIC,
        **_named(a_replay_has_the_identical_rows, a_changed_row_is_noticed, what_is_hidden_stops_the_replay),
        **FURTHER,
    },
    "opaque": {
        **BASIC,
        **_named(a_batch_that_is_planned_again_leaves_no_gap, what_is_hidden_comes_in_a_later_batch),
        **FURTHER,
    },
    "non-transactional": {},
}


def check_source(make_feed: Callable[[], Feed], spark: SparkSession, settings: Settings) -> Iterator[str]:
    """Try every promise of the source's kind on a fresh feed; yield the names of those that were kept.

    A promise that needs a way to change or hide rows is left out if the feed has none.

    Raises: BrokenPromise.
    """
    for name, promise in PROMISES[make_feed().source.kind].items():
        try:
            promise(Bench(make_feed(), spark, settings))
        except NotPossible:
            continue
        yield name


@dataclass(frozen=True)
class GivenStates:
    """Answers state queries from DataFrames, by ``pipeline.state``."""

    states: Mapping[str, DataFrame]

    def look_up(
        self, rows: DataFrame, of: str, on: Mapping[str, str], columns: Mapping[str, str] | None, how: How
    ) -> DataFrame:
        """Return the rows with columns of a state, as `tidegate.jobs.state_queries.state_query` describes.

        Raises: DeclarationInvalid if no rows of the state are given.
        """
        if of not in self.states:
            raise DeclarationInvalid(f"The transform queries {of}, and no rows of it are given: states={{{of!r}: ...}}.")
        state = self.states[of]
        aliases = columns if columns is not None else {name: name for name in state.columns if name not in (*on, "txid")}
        keys = [state[key].alias(f"_key_{number}") for number, key in enumerate(on)]
        found_rows = state.select(*keys, *(state[name].alias(alias) for name, alias in aliases.items()))
        same = [rows[name].eqNullSafe(found_rows[f"_key_{number}"]) for number, name in enumerate(on.values())]
        kinds = {"left": "left", "inner": "inner", "anti": "left_anti"}
        return rows.join(found_rows, same or [F.lit(True)], kinds[how]).drop(*(f"_key_{number}" for number in range(len(keys))))


def check_aggregate(aggregate: Aggregate, rows: DataFrame, settings: Settings, *, splits: int = 6, seed: int = 0) -> None:
    """Try whether an aggregate is the same for any split and order of rows: partials by Spark, merged by Postgres.

    The rows should have NULLs, both ends of the types, and repeated values; they are all held in memory.

    Raises: BrokenPromise with the values that differ; Overflow if one does not fit, and whatever else a commit would raise.
    """
    AggregateBench(aggregate, rows, settings, random.Random(seed)).check(splits)  # noqa: S311


def partials(
    pipeline: Pipeline, rows: DataFrame | Mapping[str, DataFrame], *, states: Mapping[str, DataFrame] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Return the partials of a batch of these rows: per state, a dict of columns per key. Needs no Postgres or Airflow.

    If the pipeline's source is `Inputs`, the rows are a mapping of names to DataFrames, as its transform gets it. `states` has
    the rows of the states that the transform queries, by ``pipeline.state``.

    Raises: DeclarationInvalid if the transform's columns do not fit the states.
    """
    with answered_by(GivenStates(states or {})):
        if pipeline.transform:
            transformed: DataFrame = pipeline.transform(rows)
        else:
            frames = rows if isinstance(rows, Mapping) else {"": rows}
            transformed = merged(frames, {name: frame.schema for name, frame in frames.items()})
    return {
        name: [row.asDict() for row in aggregate(transformed, transformed.schema, state, state.spec(name)).collect()]
        for name, state in pipeline.states.items()
    }


def _as_saved(metadata: SourceMetadata) -> SourceMetadata:
    saved: SourceMetadata = json.loads(encode_metadata(metadata))["metadata"]
    if saved != metadata:
        raise BrokenPromise(f"metadata is plain JSON data: {metadata} comes back as {saved}.")
    return saved


def _check_equal(promise: str, expected: Rows, actual: Rows) -> None:
    if missing := expected - actual:
        raise BrokenPromise(f"{promise}: {missing.total()} rows are missing, such as {next(iter(missing))}.")
    if doubled := actual - expected:
        raise BrokenPromise(f"{promise}: {doubled.total()} rows are too many, such as {next(iter(doubled))}.")
