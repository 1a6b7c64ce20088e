"""A pipeline's declaration as the store sees it: no Spark, no Airflow, comparable and hashable.

Authors write a `tidegate.jobs.Pipeline`, which hands the store a `PipelineSpec`. The spec's `fingerprint` is registered in the
database, written into every attempt and compared by commits (I16 in docs/protocol.md): partials, an attempt's results per key,
of one declaration are never merged into a state of another.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from tidegate.state_store.declarations.column_spec import (
    ARRAY_MERGES,
    PREVIOUS_TXID,
    RESERVED_COLUMNS,
    TO_TXID,
    TXID,
    VALID_TO,
    ColumnType,
    DerivedColumn,
    KeyColumn,
    ValueColumn,
    check_name,
    previous_name,
)
from tidegate.state_store.declarations.window_spec import WindowSpec

# One version for all combiners: raise it when the meaning of a stored value changes.
COMBINER_VERSION = 1
# The usual number of batches begun and not committed: more than are worth merging together, and few enough for their staging.
WINDOW = 16
# The periods of range partitions by a date or time, and the column's types; other ranges are so many whole numbers.
PERIODS = ("day", "week", "month", "year")
TIMES, NUMBERS = ("date", "timestamptz", "timestamp"), ("integer", "bigint")

# What a source needs to read exactly one batch: plain JSON data.
SourceMetadata = dict[str, Any]
# A source may promise the same rows for a txid (transactional), or each row in one committed txid (opaque); states rely on it.
SourceKind = Literal["transactional", "opaque", "non-transactional"]
StateKind = Literal["transactional", "opaque", "non-transactional"]
# What a transform reads of a state: the rows that the batch before has left, the same in each attempt; or the current rows.
AsOf = Literal["previous txid", "latest"]
_STAGED_IN_ORDER = ("integer", "bigint", "date", "timestamptz", "timestamp")
# Fields that may change without changing what a stored value means.
_WITHOUT_MEANING = ("quarantines", "keeps_files", "window", "checks", "rebuilds", "known_columns")
_COMPOSED, _FOLLOWED = "inputs ", "changes of "
_T = TypeVar("_T")


@dataclass(frozen=True)
class Validity:
    """How long the versions in a history, a key's successive rows, are valid.

    `order` are the columns of the key that put versions in order; the first says from when a version is valid. One in which
    column `deleted` is true ends the version before, and readers do not see it. With `collapses`, equal neighbours are one.
    """

    order: tuple[str, ...]
    deleted: str | None = None
    collapses: bool = False


@dataclass(frozen=True)
class Ranges:
    """How appended rows are divided into tables of Postgres: by ranges of `column`, which is never NULL then.

    `every` is "day", "week" (from Monday on), "month" or "year" for a date or time, in UTC if the column is a timestamptz; or
    how many numbers a range has, for an integer or bigint.
    """

    column: str
    every: str | int

    def __post_init__(self) -> None:
        is_number = isinstance(self.every, int) and not isinstance(self.every, bool) and 0 < self.every < 2**63
        if self.every not in PERIODS and not is_number:
            raise ValueError(
                f"Ranges({self.column!r}) cannot be of {self.every!r}: use {', '.join(PERIODS)}, or how many numbers."
            )


def exactly_once(source: SourceKind, state: StateKind) -> bool:
    """Return whether this pair of kinds is exactly-once; others are at-least-once at best."""
    return state in {"transactional": ("transactional", "opaque"), "opaque": ("opaque",)}.get(source, ())


@dataclass(frozen=True)
class StateSpec:
    """A state table: one row per key, or a single row for a global state, which has no key.

    Its kind decides what it keeps besides the values: transactional keeps the txid that wrote the row last; opaque keeps that
    and the row's previous values; non-transactional keeps nothing.

    A table that `appends` has one row per row of a batch instead, with the txid of the batch. Its key is the position within
    the batch. It keeps no previous values, as its rows are never changed.

    A `history` has one row per version of a key, in a table with a name of its own, and is read by a view, which says until
    when each version is valid.

    With `changes`, a second table records what each txid changed, by key: the values after it and before it.

    If the state `updates`, it has no table: in the commit, the author's code runs over the rows, `before` and `update` before
    and after the other states are merged. A spec that was read from the ledger lacks this code, and cannot commit.

    With a `window`, the last key column is the start of the window, and the values begin with the window's end, its last event
    and the number of its corrections.

    With `ranges`, a table per range holds appended rows.
    """

    name: str
    keys: tuple[KeyColumn, ...]
    values: tuple[ValueColumn, ...]
    kind: StateKind = "transactional"
    derived: tuple[DerivedColumn, ...] = ()
    appends: bool = False
    changes: bool = False
    updates: bool = False
    history: Validity | None = None
    update: Callable[[Any], None] | None = field(default=None, compare=False, repr=False)
    before: Callable[[Any], None] | None = field(default=None, compare=False, repr=False)
    window: WindowSpec | None = None
    ranges: Ranges | None = None

    def __post_init__(self) -> None:
        check_name("state", self.name)
        if self.kind not in get_args(StateKind):
            raise ValueError(f"State {self.name} cannot be {self.kind!r}: use one of {', '.join(get_args(StateKind))}.")
        if not self.values:
            raise ValueError(f"State {self.name} needs at least one {'column' if self.appends else 'aggregate'}.")
        if self.changes and not self.keeps_previous:
            raise ValueError(f"State {self.name} cannot record changes without the values before: declare kind='opaque'.")
        self._check_window()
        self._check_ranges()
        self._check_columns()

    def _check_columns(self) -> None:
        arrays = [key.name for key in self.keys if key.type.element]
        arrays += [value.name for value in self.values if value.type.element and value.merge not in ARRAY_MERGES]
        if arrays:
            raise ValueError(f"State {self.name} cannot keep an array in {arrays[0]}: only aggregates of several values do.")
        names = [column.name for column in (*self.columns, *self.derived, *self.validity)]
        if self.keeps_previous:
            names += [previous_name(value.name) for value in self.values]
        for name in names:
            check_name(f"column of state {self.name}", name)
            if name in RESERVED_COLUMNS:
                raise ValueError(
                    f"State {self.name} cannot have a column named {name}: Tidegate or Postgres keeps its own there."
                )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"State {self.name} has two columns named {twice[0]}.")

    def _check_window(self) -> None:
        if self.window is None:
            return
        if self.window.is_session and self.kind != "transactional":
            raise ValueError(
                f"State {self.name} cannot have sessions and be {self.kind}: when sessions become one, their rows before that "
                "are gone. Declare it transactional, over a transactional source, or use Tumbling windows."
            )
        joins_many = self.window.is_session or self.window.per_piece > 1
        if joins_many and (own := [value.name for value in self.values if value.merge == "own"]):
            raise ValueError(
                f"State {self.name} cannot keep {own[0]} by such windows: the commit joins many values of one at once, and an "
                "author's combiner joins two. Use Tumbling windows."
            )
        if self.window.emits and self.changes:
            raise ValueError(
                f"State {self.name} cannot record both its changes and its final windows, as those who follow it get one of "
                "these. Declare two states."
            )

    def _check_ranges(self) -> None:
        if self.ranges is None:
            return
        column = next((value for value in self.values if value.name == self.ranges.column), None)
        if column is None:
            raise ValueError(f"State {self.name} cannot be divided by {self.ranges.column}: it has no such column.")
        usual = NUMBERS if isinstance(self.ranges.every, int) else TIMES
        if column.type.name not in usual:
            raise ValueError(
                f"State {self.name} cannot be divided by ranges of {self.ranges.every} of column {column.name}, a "
                f"{column.type.name}: its type has to be {' or '.join(usual)}."
            )

    @property
    def required(self) -> tuple[str, ...]:
        """Return the columns that may not be NULL although their aggregates could: the one that divides the table."""
        return (self.ranges.column,) if self.ranges else ()

    @property
    def columns(self) -> tuple[KeyColumn | ValueColumn, ...]:
        """Return keys, then values, in the order in which they are staged and stored."""
        return (*self.keys, *self.values)

    @property
    def shown(self) -> tuple[KeyColumn | ValueColumn | DerivedColumn, ...]:
        """Return the columns that readers see: keys, values, derived values, and the txid that wrote the row last."""
        txid = (TXID,) if self.has_txid and not self.appends else ()
        return (*self.row_key, *self.results, *txid)

    @property
    def results(self) -> tuple[KeyColumn | ValueColumn | DerivedColumn, ...]:
        """Return the values, what is derived from these and, in a history, until when they are valid."""
        return (*self.values, *self.derived, *self.validity)

    @property
    def validity(self) -> tuple[KeyColumn, ...]:
        """Return the columns of a history that come from a key's next version: its time and its txid; NULL if there is none."""
        if self.history is None:
            return ()
        since = next(key for key in self.keys if key.name == self.history.order[0])
        ends = [KeyColumn(VALID_TO, since.type, nullable=True)]
        if self.has_txid:
            ends.append(KeyColumn(TO_TXID, TXID.type, nullable=True))
        return tuple(ends)

    @property
    def table_name(self) -> str:
        """Return the name of the table that commits write; the name of a history is that of its view."""
        return self.name if self.history is None else f"{self.name}_versions"

    @property
    def row_key(self) -> tuple[KeyColumn, ...]:
        """Return the columns that identify a row: the keys, after the txid if rows are appended."""
        return (TXID, *self.keys) if self.appends else self.keys

    @property
    def records(self) -> str | None:
        """Return the name of the table that records changes, or final windows; None if the state records neither."""
        if self.changes:
            return f"{self.name}_changes"
        return f"{self.name}_final" if self.window and self.window.emits else None

    @property
    def stream(self) -> tuple[str, tuple[KeyColumn | ValueColumn, ...]] | None:
        """Return the table, and its columns, that other pipelines read to follow this state; None without one.

        It is the table of appended rows itself, the table of changes, whose previous values are NULL for a new key, or the
        table of final windows.
        """
        if self.appends and self.is_table:
            return self.name, (*self.row_key, *self.values)
        if self.records is None:
            return None
        if not self.changes:
            return self.records, (TXID, *self.keys, *self.values)
        before = (replace(value, name=previous_name(value.name), merge="last") for value in self.values)
        return self.records, (TXID, *self.keys, *self.values, *before, KeyColumn(PREVIOUS_TXID, TXID.type, nullable=True))

    @property
    def is_table(self) -> bool:
        """Return whether the state is a table that can be read, and not an author's update."""
        return not self.updates

    @property
    def is_by_key(self) -> bool:
        """Return whether the state is a table with one row for each key, not of appended rows or versions."""
        return self.is_table and not self.appends and self.history is None

    @property
    def without_code(self) -> "StateSpec":
        """Return the state without the author's code, as the ledger keeps it."""
        return replace(self, update=None, before=None, values=tuple(replace(value, combine=None) for value in self.values))

    @property
    def why_alone(self) -> str | None:
        """Return why each batch has to be merged by itself; None if several may be merged together."""
        if self.keeps_previous:
            return f"state {self.name} keeps the values before each txid"
        if self.updates:
            return f"update {self.name} runs between batches"
        if own := [value.name for value in self.values if value.merge == "own"]:
            return f"state {self.name} has an author's combiner, {own[0]}"
        if self.window and self.window.commits_alone:
            return f"windows of state {self.name} depend on the batch before"
        return None

    @property
    def keeps_previous(self) -> bool:
        """Return whether a row keeps the values from before its txid."""
        return self.kind == "opaque" and not self.appends

    @property
    def has_txid(self) -> bool:
        """Return whether the rows carry the txid that wrote them last."""
        return self.kind != "non-transactional"


@dataclass(frozen=True)
class QuarantineSpec:
    """The bad records of a batch, staged beside its partials; its commit moves them into the quarantine."""

    pipeline: str
    keys: tuple[KeyColumn, ...] = ()
    required: tuple[str, ...] = ()
    columns: tuple[KeyColumn, ...] = (
        KeyColumn("reason", ColumnType("text")),
        KeyColumn("origin", ColumnType("text"), nullable=True),
        KeyColumn("payload", ColumnType("text")),
        KeyColumn("is_raw", ColumnType("boolean")),
    )

    @property
    def name(self) -> str:
        """Return the name in its staging tables' names; no state's name begins with an underscore."""
        return f"_q_{self.pipeline}"


# What an attempt stages: rows with these columns, in a table of this name.
Staged = StateSpec | QuarantineSpec


def staged_in_order_of(staged: Staged) -> str | None:
    """Return the key in whose order tasks stage rows: the first, if it is an integer, date or time."""
    return staged.keys[0].name if staged.keys and staged.keys[0].type.name in _STAGED_IN_ORDER else None


@dataclass(frozen=True)
class StateRead:
    """A state that a transform reads, written ``pipeline.state``, and as of when."""

    of: str
    as_of: AsOf

    @property
    def pipeline(self) -> str:
        """The pipeline that owns the state."""
        return self.of.partition(".")[0]

    @property
    def state(self) -> str:
        """The state's name."""
        return self.of.partition(".")[2]


def check_of(of: str) -> None:
    """Refuse what does not name a pipeline and its state.

    Raises: ValueError.
    """
    if of.count(".") != 1:
        raise ValueError(f"{of!r} has to name pipeline and state, as in flights.daily.")
    for what, name in zip(("pipeline", "state"), of.split("."), strict=True):
        check_name(what, name)


@dataclass(frozen=True)
class PipelineSpec:
    """A pipeline as the store knows it."""

    name: str
    source_kind: SourceKind
    source_identity: str
    states: tuple[StateSpec, ...]
    version: int = 1
    quarantines: bool = False
    # Whether the ledger keeps the name and digest of each file of committed batches, so that it counts once.
    keeps_files: bool = False
    # How many batches may be in flight: begun, and not committed.
    window: int = WINDOW
    # Names and checks: code, which a spec that was read from the ledger lacks.
    checks: tuple[tuple[str, Any], ...] = field(default=(), compare=False, repr=False)
    # The states that the transform reads.
    queries: tuple[StateRead, ...] = ()
    # The pipeline whose committed batches this one computes again (`tidegate.state_store.pipeline_changes.rebuilds`); None: it
    # plans its own.
    rebuilds: str | None = field(default=None, compare=False)
    # By input, the columns that the source declares or ignores: nobody has to be told of them.
    known_columns: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_name("pipeline", self.name)
        if not self.states:
            raise ValueError(f"Pipeline {self.name} declares no state.")
        if twice := [table for table in self.tables if self.tables.count(table) > 1]:
            raise ValueError(
                f"Pipeline {self.name} has two tables named {twice[0]}: of a state, its versions, or what it records."
            )

    @property
    def declaration(self) -> dict[str, Any]:
        """Return everything that decides what a stored value means, as plain data."""
        without_code = replace(self, checks=(), states=tuple(state.without_code for state in self.states))
        meaning = {name: value for name, value in asdict(without_code).items() if name not in _WITHOUT_MEANING}
        for state in meaning["states"]:
            del state["update"], state["before"], state["ranges"]
            if state["window"]:
                del state["window"]["keep"]
            for value in state["values"]:
                del value["combine"]
        return {"combiners": COMBINER_VERSION, **meaning}

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the declaration in hex."""
        return hashlib.sha256(json.dumps(self.declaration, sort_keys=True).encode()).hexdigest()

    @property
    def why_alone(self) -> list[str]:
        """Return why each batch is merged by itself; empty if several may be merged in one transaction."""
        checks = ["checks look at the states after each batch"] if self.checks else []
        return checks + [why for state in self.states if (why := state.why_alone)]

    @property
    def commits_alone(self) -> bool:
        """Return whether each batch is merged by itself."""
        return bool(self.why_alone)

    @property
    def awaits_previous(self) -> bool:
        """Return whether a batch begins only after the one before has committed, to read states as of that txid."""
        return any(query.as_of == "previous txid" for query in self.queries)

    @property
    def read_pipelines(self) -> set[str]:
        """Return the names of other pipelines whose states the source follows, or the transform reads."""
        return (followed_by(self.source_identity) | {query.pipeline for query in self.queries}) - {self.name}

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the names of the pipeline's tables and views in schema ``state``, without partitions."""
        of_states = (name for s in self.readable for name in dict.fromkeys((s.name, s.table_name)))
        return (*of_states, *(s.records for s in self.states if s.records))

    @property
    def readable(self) -> tuple[StateSpec, ...]:
        """Return the states that are tables."""
        return tuple(state for state in self.states if state.is_table)

    @property
    def staged(self) -> tuple[Staged, ...]:
        """Return everything that an attempt stages: a table each."""
        return (*self.states, QuarantineSpec(self.name)) if self.quarantines else self.states

    def state(self, name: str) -> StateSpec | None:
        """Return the state of this name, or None; in a rebuild, also by the name that it will have."""
        names = (name, rebuilt_name(name, self.version)) if self.rebuilds else (name,)
        return next((state for state in self.states if state.name in names), None)


class RebuildName(NamedTuple):
    """The name of a rebuild in parts: the pipeline that it computes again, and for which version."""

    pipeline: str
    version: int


def rebuilt_name(name: str, version: int) -> str:
    """Return the name of a pipeline or state while it is rebuilt for this version."""
    return f"{name}__v{version}"


def taken_over(pipeline: str) -> tuple[str, str]:
    """Return by whom, and why, a rebuild is retired that has taken a pipeline's place; followers look for when that was."""
    return "tidegate migrate", f"its states have taken the place of those of {pipeline}"


def rebuilt_by(declaration: Mapping[str, Any]) -> RebuildName | None:
    """Return what a registered pipeline rebuilds; None if it is no rebuild: then not all of its states end like its name."""
    found = rebuild_named(declaration["name"])
    ends = found is not None and all(state["name"].endswith(f"__v{found.version}") for state in declaration["states"])
    return found if ends else None


def rebuild_named(name: str) -> RebuildName | None:
    """Return the parts of the name of a rebuild; None for any other name."""
    pipeline, mark, version = name.rpartition("__v")
    return RebuildName(pipeline, int(version)) if mark and version.isdecimal() and pipeline else None


def spec_of(declaration: Mapping[str, Any]) -> PipelineSpec:
    """Return the pipeline of a registered declaration: `PipelineSpec.declaration` the other way round, without its code."""
    states = tuple(_state_of(state) for state in declaration["states"])
    queries = tuple(_read(StateRead, query) for query in declaration["queries"])
    return _read(PipelineSpec, declaration, states=states, queries=queries)


def _state_of(declared: Mapping[str, Any]) -> StateSpec:
    columns = {
        part: tuple(_read(kind, column, type=_read(ColumnType, column["type"])) for column in declared[part])
        for part, kind in (("keys", KeyColumn), ("values", ValueColumn), ("derived", DerivedColumn))
    }
    window, history = declared["window"], declared["history"]
    return _read(
        StateSpec,
        declared,
        **columns,
        window=_read(WindowSpec, window) if window else None,
        history=_read(Validity, history) if history else None,
    )


def _read(kind: type[_T], declared: Mapping[str, Any], **parts: Any) -> _T:
    """Return a dataclass from its fields in JSON, where tuples are lists; unknown fields are left out."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in declared.items() if name in names}
    return kind(**(plain | parts))


def followed_as(pipeline: str, state: str) -> str:
    """Return the identity of a source that follows this state."""
    return f"{_FOLLOWED}{pipeline}.{state}"


def followed_by(identity: str) -> set[str]:
    """Return the names of the pipelines whose states a source follows."""
    followed = (part for part in parts_of(identity).values() if part.startswith(_FOLLOWED))
    return {part.removeprefix(_FOLLOWED).partition(".")[0] for part in followed}


# If its source has several inputs, a quarantined record's origin begins with the name of its input and this, which no name has.
INPUT_END = ": "


def composed_of(inputs: Mapping[str, str], references: Mapping[str, str]) -> str:
    """Return the identity of a source that is composed of others, from theirs, by name."""
    return f"{_COMPOSED}{json.dumps([inputs, references], sort_keys=True)}"


def parts_of(identity: str) -> dict[str, str]:
    """Return the identities of a source's inputs by name; without inputs, its own under the name ""."""
    if not identity.startswith(_COMPOSED):
        return {"": identity}
    inputs: dict[str, str] = json.loads(identity.removeprefix(_COMPOSED))[0]
    return inputs


def references_of(identity: str) -> list[str]:
    """Return the names of the references that a source's rows are joined with."""
    return sorted(json.loads(identity.removeprefix(_COMPOSED))[1]) if identity.startswith(_COMPOSED) else []
