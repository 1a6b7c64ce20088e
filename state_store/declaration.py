"""What a pipeline promises about its tables, in the store's own words: no Spark, no Airflow, comparable and hashable.

`jobs.Pipeline` is what authors write; it hands the store a `PipelineSpec`. The spec's `fingerprint` is registered in the
database, written into every attempt and compared under the cursor's lock at commit (I16): partials computed by
one declaration never meet state that belongs to another.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
NUMERIC = re.compile(r"numeric\((\d{1,2}),\s?(\d{1,2})\)")
# One version for all combiners: raise it when the meaning of a stored value changes.
COMBINER_VERSION = 1
# More than are worth merging together, and few enough for what they have staged: a million keys take some 100 MB.
WINDOW = 16

# What a source needs to read exactly one batch: plain JSON data.
SourceMetadata = dict[str, Any]
Merge = Literal["sum", "min", "max"]
# What a source promises about replays, and what a state keeps to make use of it (docs/semantics.md).
SourceKind = Literal["transactional", "opaque", "non-transactional"]
StateKind = Literal["transactional", "opaque", "non-transactional"]
# Our own columns, and those that every Postgres table has already.
SNAPSHOT, PREVIOUS_TXID = "snapshot", "previous_txid"
_RESERVED_COLUMNS = ("txid", PREVIOUS_TXID, SNAPSHOT, "task_attempt", "ctid", "xmin", "xmax", "cmin", "cmax", "tableoid")
_STAGED_IN_ORDER = ("integer", "bigint", "date", "timestamptz", "timestamp")
# What may be declared otherwise without a stored value meaning something else.
_MEANS_NOTHING = ("quarantines", "keeps_files", "window")
_SIMPLE_TYPES = ("text", "boolean", "integer", "bigint", "date", "timestamptz", "timestamp", "uuid", "bytea")


@dataclass(frozen=True)
class ColumnType:
    """A column's Postgres type: text, boolean, integer, bigint, date, timestamptz, timestamp, uuid, bytea, numeric(20,4).

    Text compares by bytes (COLLATE "C"), as Spark does, so that both agree on order and equality. A timestamp
    is without zone. Not among them: double, because its sums depend on the order of the rows (a column of doubles is kept
    as numeric), and jsonb, which no aggregate merges (the text of a document is kept as text).
    """

    name: str

    def __post_init__(self) -> None:
        if self.name in _SIMPLE_TYPES:
            return
        numeric = NUMERIC.fullmatch(self.name)
        if not numeric or not (1 <= int(numeric[1]) <= 38 and int(numeric[2]) <= int(numeric[1])):  # 38: Spark's limit
            known = ", ".join([*_SIMPLE_TYPES, "numeric(precision,scale) with precision up to 38"])
            raise ValueError(f"{self.name!r} is not a column type. Choose one of: {known}.")

    @property
    def precision_and_scale(self) -> tuple[int, int] | None:
        """Return a numeric type's precision and scale, None for any other."""
        numeric = NUMERIC.fullmatch(self.name)
        return (int(numeric[1]), int(numeric[2])) if numeric else None


@dataclass(frozen=True)
class KeyColumn:
    """A column of the state's key; `nullable` keeps rows without the key as a group of their own."""

    name: str
    type: ColumnType
    nullable: bool = False


@dataclass(frozen=True)
class ValueColumn:
    """A value kept per key: what it is computed from, such as ``sum(cents)``, and how a batch's partial is merged into it."""

    name: str
    type: ColumnType
    merge: Merge
    computed: str = ""

    @property
    def nullable(self) -> bool:
        """Tell whether there may be no value: sums and counts of nothing are 0, the least of nothing is NULL."""
        return self.merge != "sum"


def previous_name(value: str) -> str:
    """Return the column in which an opaque state keeps what a value was before its row's txid."""
    return f"previous_{value}"


def exactly_once(source: SourceKind, state: StateKind) -> bool:
    """Tell whether this pair of kinds gives exactly-once; any other gives at-least-once at best (docs/semantics.md)."""
    return state in {"transactional": ("transactional", "opaque"), "opaque": ("opaque",)}.get(source, ())


@dataclass(frozen=True)
class StateSpec:
    """A state table: one row per key, or one row in all for a global state, which has no key.

    What it keeps besides the values is its kind: transactional the txid that wrote the row last; opaque that, and what the
    row was before; non-transactional nothing.
    """

    name: str
    keys: tuple[KeyColumn, ...]
    values: tuple[ValueColumn, ...]
    kind: StateKind = "transactional"

    def __post_init__(self) -> None:
        check_name("state", self.name)
        if self.kind not in get_args(StateKind):
            raise ValueError(f"State {self.name} cannot be {self.kind!r}: use one of {', '.join(get_args(StateKind))}.")
        if not self.values:
            raise ValueError(f"State {self.name} needs at least one aggregate.")
        names = [column.name for column in self.columns]
        if self.kind == "opaque":
            names += [previous_name(value.name) for value in self.values]
        for name in names:
            check_name(f"column of state {self.name}", name)
            if name in _RESERVED_COLUMNS:
                raise ValueError(
                    f"State {self.name} cannot have a column named {name}: Tidegate or Postgres keeps its own there."
                )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"State {self.name} has two columns named {twice[0]}.")

    @property
    def columns(self) -> tuple[KeyColumn | ValueColumn, ...]:
        """Return keys, then values, in the order in which they are staged and stored."""
        return (*self.keys, *self.values)

    @property
    def has_txid(self) -> bool:
        """Tell whether the rows say which txid wrote them last."""
        return self.kind != "non-transactional"


@dataclass(frozen=True)
class QuarantineSpec:
    """The bad records of a pipeline's batch, staged beside its partials and committed with them."""

    pipeline: str
    keys: tuple[KeyColumn, ...] = ()
    columns: tuple[KeyColumn, ...] = (
        KeyColumn("reason", ColumnType("text")),
        KeyColumn("origin", ColumnType("text"), nullable=True),
        KeyColumn("payload", ColumnType("text")),
        KeyColumn("is_raw", ColumnType("boolean")),
    )

    @property
    def name(self) -> str:
        """Return what its staging is called; no state's name starts like this."""
        return f"_q_{self.pipeline}"


# What can be staged: rows with these columns, in a table of this name.
Staged = StateSpec | QuarantineSpec


def staged_in_order_of(staged: Staged) -> str | None:
    """Return the key in whose order tasks stage rows: the first, if it is a number or a time; None if rows come as they are."""
    return staged.keys[0].name if staged.keys and staged.keys[0].type.name in _STAGED_IN_ORDER else None


@dataclass(frozen=True)
class PipelineSpec:
    """What the store knows of a pipeline."""

    name: str
    source_kind: SourceKind
    source_identity: str
    states: tuple[StateSpec, ...]
    version: int = 1
    quarantines: bool = False
    # Whether the ledger keeps the files of committed batches (`state_store.source_files`).
    keeps_files: bool = False
    # How many batches may be in flight: begun, and not committed.
    window: int = WINDOW

    def __post_init__(self) -> None:
        check_name("pipeline", self.name)
        if not self.states:
            raise ValueError(f"Pipeline {self.name} declares no state.")

    @property
    def declaration(self) -> dict[str, Any]:
        """Return everything that decides what a stored value means, as plain data."""
        meaning = {name: value for name, value in asdict(self).items() if name not in _MEANS_NOTHING}
        return {"combiners": COMBINER_VERSION, **meaning}

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the declaration in hex."""
        return hashlib.sha256(json.dumps(self.declaration, sort_keys=True).encode()).hexdigest()

    @property
    def staged(self) -> tuple[Staged, ...]:
        """Return everything that an attempt stages: a table each."""
        return (*self.states, QuarantineSpec(self.name)) if self.quarantines else self.states

    def state(self, name: str) -> StateSpec | None:
        """Return the state of this name, or None."""
        return next((state for state in self.states if state.name == name), None)


def check_name(what: str, name: str) -> None:
    """Refuse a name that could not be a plain Postgres identifier with room for a txid and an attempt behind it."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be the name of a {what}: use lower case letters, digits and _, a letter first, at most 40."
        )
