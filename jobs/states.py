"""States: what the rows of a batch become in Postgres. A table of the state's name in schema ``state`` each, except updates.

    State     one row per key, with aggregates of all rows
    Newest    one row per key: its newest version
    History   one row per version of a key, with the time until which it was valid
    Rows      one row per row
    Update    what the author's own statements make of the rows

docs/states.md compares them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from tidegate.jobs.aggregates import Aggregate, Part, in_order
from tidegate.jobs.windows import Window, parts_of
from tidegate.state_store.declarations.column_spec import POSITION, ColumnType, DerivedColumn, KeyColumn
from tidegate.state_store.declarations.pipeline_spec import Ranges, StateKind, StateSpec, Validity
from tidegate.state_store.declarations.window_spec import WINDOW_START

if TYPE_CHECKING:
    from tidegate.state_store.commit.author_updates import UpdateBatch

# Postgres' name for the row that an upsert inserts: a table of this name could not be distinguished from it.
_UPSERTED = "excluded"


class _Keyed(ABC):
    """The common part of states that keep one row per key."""

    key: Mapping[str, str]
    null_keys: bool
    kind: StateKind
    unanchored: bool
    changes: bool
    window: Window | None = None

    @property
    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Return the kept columns."""

    @property
    def keyed_by(self) -> Mapping[str, str]:
        """Return the columns that a row is found by, with their types."""
        return self.key

    @property
    def required(self) -> Mapping[str, str]:
        """Return the columns in which no row may have NULL, and what each of them is."""
        keys = [name for name in sorted(self.keyed_by) if not self._may_be_null(name)]
        return dict.fromkeys(keys, "key column") | ({self.window.spec.column: "time column"} if self.window else {})

    @property
    def derived(self) -> tuple[DerivedColumn, ...]:
        """Return the columns that Postgres derives from others."""
        return ()

    def _may_be_null(self, column: str) -> bool:
        """Return whether NULL in a column that rows are found by is a value as any other."""
        return self.null_keys and column in self.key

    def spec(self, name: str) -> StateSpec:
        """Return the store's view of this state."""
        keys = tuple(KeyColumn(name, ColumnType(kind), self._may_be_null(name)) for name, kind in self.keyed_by.items())
        values = tuple(part.value_column for part in self.parts)
        window = self.window.spec if self.window else None
        if name == _UPSERTED and not (isinstance(self, History) or (window and window.is_session)):
            raise ValueError(f"{name!r} cannot be the name of such a state: Postgres' upserts have a table {name} themselves.")
        if window:
            keys += (KeyColumn(WINDOW_START, ColumnType(window.type)),)
        return StateSpec(
            name,
            keys,
            values,
            self.kind,
            self.derived,
            changes=self.changes,
            window=window,
        )


@dataclass(frozen=True)
class State(_Keyed):
    """One row per key, with its aggregates. Without a key: a single row.

    `key` maps key columns to Postgres types, `aggregates` value columns to aggregates. A row whose key has a NULL fails the
    batch, unless `null_keys` keeps such rows as a group of their own.

    `kind` decides what a row keeps besides its values. An opaque state also keeps the values before the last txid, so that
    this txid can be redone; opaque sources need one.

    An `unanchored` state is left out of the sums of row hashes: rows that get lost on the way into it go unnoticed.

    With `changes`, an opaque state records what each txid changed, by key, in the table ``<state>_changes``: the values after
    it, and those before it as ``previous_<value>``. Another pipeline can follow them: `tidegate.jobs.sources.changes.Changes`.

    With a `window`, there is a row per key and window of event time (`tidegate.jobs.windows`). Its start is the last column of
    the key, `window_start`; it also has `window_end`, `last_event`, the time of its last row, and `corrections`: how many
    batches have changed it after the watermark, the greatest event time that had counted before them, had passed its end. A row
    whose time is NULL fails the batch.
    """

    key: Mapping[str, str] = field(default_factory=dict)
    aggregates: Mapping[str, Aggregate] = field(default_factory=dict)
    null_keys: bool = False
    kind: StateKind = "transactional"
    unanchored: bool = False
    changes: bool = False
    window: Window | None = None

    @cached_property
    def parts(self) -> Sequence[Part]:
        """Return the columns that windows and aggregates keep."""
        of_window = parts_of(self.window.spec) if self.window else ()
        return (*of_window, *(part for name, aggregate in self.aggregates.items() for part in aggregate.parts(name)))

    @cached_property
    def derived(self) -> tuple[DerivedColumn, ...]:
        """Return the columns that Postgres derives from others."""
        derived = (aggregate.derived(name) for name, aggregate in self.aggregates.items())
        several = ((each,) if isinstance(each, DerivedColumn) else each or () for each in derived)
        return tuple(column for columns in several for column in columns)


@dataclass(frozen=True)
class Newest(_Keyed):
    """One row per key, its newest version: a feed of changes becomes a table.

    `key`, `columns` and `order_by` map columns of the rows to Postgres types; the row that is greatest in `order_by`, the most
    significant column first, is the newest, in whatever order the rows come. Where two are equal there, a deletion is newer,
    and then the greater in `columns`, so that replays agree. A row with NULL in `order_by` is older than one with a value.

    `deleted` names a boolean column of the rows that says that the key was deleted. The row then stays, as a tombstone with
    this column true, because an older version may still come: read with ``WHERE NOT deleted``.

    `null_keys`, `kind`, `unanchored` and `changes` are those of `State`.
    """

    key: Mapping[str, str]
    columns: Mapping[str, str]
    order_by: Mapping[str, str]
    deleted: str | None = None
    null_keys: bool = False
    kind: StateKind = "transactional"
    unanchored: bool = False
    changes: bool = False

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError("Newest needs a key: the columns that say of what a row is a version.")
        if not self.order_by:
            raise ValueError("Newest needs order_by: the columns that say which version is newer.")

    @cached_property
    def parts(self) -> Sequence[Part]:
        """Return the kept columns; all are those of the newest row."""
        deleted = {} if self.deleted is None else {self.deleted: "boolean"}
        values = {column: (column, kind) for column, kind in {**deleted, **self.columns}.items() if column not in self.order_by}
        return tuple(in_order({column: (column, kind) for column, kind in self.order_by.items()}, values, "last"))


@dataclass(frozen=True)
class History(_Keyed):
    """One row per version of a key: the history of a dimension, with the time from and until which each version was valid.

    `key`, `columns` and `order_by` map columns of the rows to Postgres types. A version is valid from the value of the first
    column in `order_by` until that of the key's next version, in whatever order they come: a late one is put between its
    neighbours. Two rows of a key that are equal in all of `order_by` are one version, with the greater in `columns`, so that
    replays agree. A row with NULL in `order_by` fails the batch, as its place is unknown; and so does one with NULL in `key`,
    unless `null_keys` makes NULL there a key as any other, with versions of its own. Then only the first three columns of `key`
    are looked up by the index.

    The state is a view with the columns of key, `order_by` and `columns`, ``valid_to`` (NULL: it is still valid), the ``txid``
    that brought the version, last if it came repeatedly, and ``to_txid``, that of the version which ended it. The versions
    themselves are in the table ``<state>_versions``.

    `deleted` names a boolean column of the rows that says that the key was deleted: this ends its version, and no row of the
    view follows until a later version. With `collapse`, the view shows versions that follow each other and are equal in
    `columns` as one, valid from the first of them.

    `kind`, `unanchored` and `changes` are those of `State`; changes are those of single versions.
    """

    key: Mapping[str, str]
    columns: Mapping[str, str]
    order_by: Mapping[str, str]
    deleted: str | None = None
    collapse: bool = False
    kind: StateKind = "transactional"
    unanchored: bool = False
    changes: bool = False
    null_keys: bool = False

    def __post_init__(self) -> None:
        for what, columns, reason in (
            ("a key", self.key, "the columns that say of what a row is a version"),
            ("order_by", self.order_by, "the columns that say from when on a version is valid, the time first"),
            ("columns", self.columns, "what may change from version to version"),
        ):
            if not columns:
                raise ValueError(f"History needs {what}: {reason}.")

    @property
    def keyed_by(self) -> Mapping[str, str]:
        """Return the columns that a version is found by: those of the key, then its place in the order."""
        return {**self.key, **self.order_by}

    @cached_property
    def parts(self) -> Sequence[Part]:
        """Return the kept columns; of two rows of one version, a deletion wins."""
        deleted = {} if self.deleted is None else {self.deleted: "boolean"}
        return tuple(in_order({}, {column: (column, kind) for column, kind in {**deleted, **self.columns}.items()}, "last"))

    def spec(self, name: str) -> StateSpec:
        """Return the store's view of this state."""
        if both := self.key.keys() & self.order_by.keys():
            raise ValueError(f"State {name} has {min(both)} in its key and in order_by: then each version is another key.")
        return replace(super().spec(name), history=Validity(tuple(self.order_by), self.deleted, self.collapse))


class _PerRow:
    """The common part of states that get each row of a batch by itself, with its position."""

    columns: Mapping[str, str]
    kind: StateKind
    window: Window | None = None

    @property
    def keyed_by(self) -> Mapping[str, str]:
        """Return nothing: a row is found by its txid and position."""
        return {}

    @property
    def required(self) -> Mapping[str, str]:
        """Return the columns in which no row may have NULL, and what each of them is."""
        return {}

    @property
    def parts(self) -> Sequence[Part]:
        """Return the columns."""
        return tuple(Part(column, kind, "append", "none", column) for column, kind in self.columns.items())

    def spec(self, name: str) -> StateSpec:
        """Return the store's view of this state."""
        position = KeyColumn(POSITION, ColumnType("bigint"))
        return StateSpec(name, (position,), tuple(part.value_column for part in self.parts), self.kind, appends=True)


@dataclass(frozen=True)
class Rows(_PerRow):
    """One row per row of a batch: each is appended once, and never changed.

    `columns` maps columns of the rows to Postgres types; any may be NULL. A row also has the `txid` of its batch, and its
    `position` within it; both are its key. Positions are different, and ascend in the order in which a Spark task has read the
    rows, with gaps between tasks. A redo of the last batch replaces its rows, so an opaque source will do.

    `range_partitions` divide the table by a column, which may then not be NULL, into one per day, per month or per range of
    numbers: ``Ranges("sold_at", "month")``. The commit that brings the first row of a range makes its table, and
    ``tidegate prune`` removes old ones. They may be declared later, or changed, by a migration that copies the table
    (docs/state-size.md).

    `unanchored` is that of `State`.
    """

    columns: Mapping[str, str]
    unanchored: bool = False
    range_partitions: Ranges | None = None
    kind: StateKind = field(default="opaque", init=False)
    key: Mapping[str, str] = field(default_factory=dict, init=False)
    null_keys: bool = field(default=True, init=False)

    @property
    def required(self) -> Mapping[str, str]:
        """Return the column that divides the rows, if there is one."""
        return {self.range_partitions.column: "column"} if self.range_partitions else {}

    def spec(self, name: str) -> StateSpec:
        """Return the store's view of these rows."""
        return replace(super().spec(name), ranges=self.range_partitions)


@dataclass(frozen=True)
class Update(_PerRow):
    """The author's own statements over the rows of a batch, for what no other state covers: an outbox, several tables at once.

    ``update(batch)`` runs in the commit of each batch, under the cursor's lock and after the other states have been merged:
    once per txid that counts, in txid order. `batch.rows` are the rows as a table of SQLAlchemy, `batch.execute` executes
    statements, `batch.txid` is the txid (`tidegate.state_store.commit.author_updates.UpdateBatch`). If the commit fails,
    nothing of it is left.

    ``before(batch)``, if given, runs in the same commit before the other states are merged, and so sees them without the batch.

    It writes tables of the author's, which the author makes, and on which the role of setting `pg_user` needs privileges. An
    update that ends the transaction, or changes its role or a setting, is refused. What it does should be quick, as all other
    commits of the pipeline wait; what it does elsewhere, such as over a connection of its own, is no part of the commit. Like a
    transform, it is code: raise the pipeline's version if its meaning changes.

    `columns` maps columns of the rows to Postgres types; any may be NULL. The last batch cannot be redone, so the source has to
    be transactional.
    """

    columns: Mapping[str, str]
    update: "Callable[[UpdateBatch], None]"
    before: "Callable[[UpdateBatch], None] | None" = None
    unanchored: bool = False
    kind: StateKind = field(default="transactional", init=False)
    key: Mapping[str, str] = field(default_factory=dict, init=False)
    null_keys: bool = field(default=True, init=False)

    def spec(self, name: str) -> StateSpec:
        """Return the store's view of this update."""
        return replace(super().spec(name), updates=True, update=self.update, before=self.before)


AnyState = State | Newest | History | Rows | Update
