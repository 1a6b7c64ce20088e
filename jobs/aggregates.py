"""Aggregates: what a batch computes per key, and how the store merges that partial into the state.

Each is associative and commutative and has an identity, bit by bit, so that batches and replays always give the same value
(I16). Sums over floating point are not, because they depend on the order of the rows, so there are none.
"""

from dataclasses import dataclass, field
from typing import Protocol

from state_store.declaration import ColumnType, Merge


class Aggregate(Protocol):
    """One value per key."""

    @property
    def column(self) -> str | None:
        """The input column; None if the aggregate has none."""

    @property
    def type(self) -> str:
        """The Postgres type of the kept value."""

    @property
    def merge(self) -> Merge:
        """How a partial joins the kept value."""

    @property
    def function(self) -> str:
        """The name of the Spark function that computes the partial."""


@dataclass(frozen=True)
class Count:
    """Count the rows, or with a column those where it is not NULL. Kept as bigint."""

    column: str | None = None
    type: str = field(default="bigint", init=False)
    merge: Merge = field(default="sum", init=False)
    function: str = field(default="count", init=False)


@dataclass(frozen=True)
class Sum:
    """Add up a whole-number or decimal column; NULLs add nothing. `type` is bigint or numeric(precision,scale).

    A transform that makes decimals of doubles decides what becomes of NaN and infinities: Spark casts them to NULL, in ANSI
    mode too, and NULL adds nothing. To refuse them, declare a `check` such as ``{"a number": "abs(v) < double('inf')"}``.
    """

    column: str
    type: str = "bigint"
    merge: Merge = field(default="sum", init=False)
    function: str = field(default="sum", init=False)

    def __post_init__(self) -> None:
        if self.type not in ("integer", "bigint") and ColumnType(self.type).precision_and_scale is None:
            raise ValueError(f"Sum({self.column!r}) cannot be kept as {self.type}: use bigint or numeric(precision,scale).")


@dataclass(frozen=True)
class Min:
    """Keep the smallest value; NULL until there is one."""

    column: str
    type: str = "bigint"
    merge: Merge = field(default="min", init=False)
    function: str = field(default="min", init=False)


@dataclass(frozen=True)
class Max:
    """Keep the largest value; NULL until there is one."""

    column: str
    type: str = "bigint"
    merge: Merge = field(default="max", init=False)
    function: str = field(default="max", init=False)
