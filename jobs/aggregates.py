"""Aggregates: what a batch computes per key, and how the store merges that partial into the state.

Each is associative and commutative and has an identity, bit by bit, so that batches and replays always give the same value
(I16). Sums over floating point are not, because they depend on the order of the rows: doubles are added up as decimals.

An aggregate is made of parts, each a column of the state's table with a merge of its own. Most aggregates have one part, named
like the aggregate. Others keep several, beside a value that Postgres derives from them, as a mean from a sum and a count.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from tidegate.state_store.declarations.column_spec import ColumnType, DerivedColumn, Formula, Merge, ValueColumn

if TYPE_CHECKING:
    from pyspark.sql import Column
    from sqlalchemy import ColumnElement

# The most digits of a decimal whose square has to fit into Spark's 38 digits.
SQUARED_DIGITS = 18
MOST_ELEMENTS = 10_000  # of an array: each merge of a key reads and writes all of them
Function = Literal[
    "count", "sum", "sum_of_squares", "min", "max", "bit_and", "bit_or", "bit_xor", "first", "last", "collect_set",
    "collect_list", "smallest", "largest", "histogram", "distinct_bits", "size_counts", "own", "none", "window_end",
    "no_corrections",
]  # fmt: skip

# A column of the rows and its Postgres type.
TypedColumn = tuple[str, str]


@dataclass(frozen=True)
class Part:
    """A column that a state keeps: `function` computes its partial from the input column, `merge` joins partials.

    `read_as` is the type that the input is converted to, without loss, if it is not the type of the column. `order` names the
    parts that decide which row is first or last, `most` is an array's largest length, `bounds` are a histogram's, `sizes` are a
    sketch's parameters, `combiner` is an author's code.
    """

    name: str
    type: str
    merge: Merge
    function: Function
    column: str | None = None
    read_as: str | None = None
    order: tuple[str, ...] = ()
    most: int | None = None
    bounds: tuple[int | Decimal, ...] = ()
    sizes: tuple[int, ...] = ()
    combiner: "Combiner | None" = None

    @property
    def value_column(self) -> ValueColumn:
        """Return the column as the store sees it."""
        if author := self.combiner:
            computed = f"{author!r} version {author.version}"
            return ValueColumn(self.name, ColumnType(self.type), self.merge, computed, combine=author.combine)
        details = "".join(f" {detail}" for detail in (self.read_as, *self.bounds, *self.sizes) if detail is not None)
        computed = f"{self.function}({self.column or '*'}{details})"
        return ValueColumn(self.name, ColumnType(self.type), self.merge, computed, self.order, self.most)


class Aggregate(Protocol):
    """What authors declare of a value per key."""

    def parts(self, name: str) -> Sequence[Part]:
        """Return the kept columns of an aggregate of this name."""

    def derived(self, name: str) -> DerivedColumn | Sequence[DerivedColumn] | None:
        """Return the columns that are derived from these, if there are any."""


class Plain:
    """An aggregate whose value is itself a kept column, or several of them."""

    def derived(self, name: str) -> None:
        """Return None: nothing is derived."""


@dataclass(frozen=True)
class Count(Plain):
    """Count the rows, or with a column those where it is not NULL. Kept as bigint."""

    column: str | None = None

    def parts(self, name: str) -> Sequence[Part]:
        """Return the count."""
        return [Part(name, "bigint", "sum", "count", self.column)]


@dataclass(frozen=True)
class _Merged(Plain):
    """Values of a column, of which batches are joined as the rows of a batch are."""

    column: str
    type: str = "bigint"
    _which: ClassVar[Literal["sum", "min", "max", "bit_and", "bit_or", "bit_xor"]]

    def parts(self, name: str) -> Sequence[Part]:
        """Return the one column."""
        return [Part(name, self.type, self._which, self._which, self.column)]


@dataclass(frozen=True)
class Sum(_Merged):
    """Add up a whole-number or decimal column; NULLs add nothing. `type` is bigint or numeric(precision,scale).

    A transform that makes decimals of doubles decides what becomes of NaN and infinities: Spark casts them to NULL, in ANSI
    mode too, and NULL adds nothing. To refuse them, declare a `check` such as ``{"a number": "abs(v) < double('inf')"}``.
    """

    _which = "sum"

    def __post_init__(self) -> None:
        if self.type not in ("integer", "bigint") and ColumnType(self.type).precision_and_scale is None:
            raise ValueError(f"Sum({self.column!r}) cannot be kept as {self.type}: use bigint or numeric(precision,scale).")


@dataclass(frozen=True)
class Min(_Merged):
    """Keep the smallest value; NULL until there is one."""

    _which = "min"


@dataclass(frozen=True)
class Max(_Merged):
    """Keep the largest value; NULL until there is one."""

    _which = "max"


@dataclass(frozen=True)
class Avg:
    """Keep the mean of a number column, NULL until there is a value, rounded to `digits` decimals.

    The sum and the count that it is made of are kept beside it, exactly, as ``<name>_sum`` and ``<name>_count``. `scale` is the
    number of decimals of the input: a value with more is refused, and never rounded.
    """

    column: str
    scale: int = 0
    digits: int = 6

    def parts(self, name: str) -> Sequence[Part]:
        """Return the sum and the count."""
        return [
            Part(f"{name}_sum", _decimal(self.scale), "sum", "sum", self.column),
            Part(f"{name}_count", "bigint", "sum", "count", self.column),
        ]

    def derived(self, name: str) -> DerivedColumn:
        """Return the mean."""
        return DerivedColumn(name, ColumnType(_decimal(self.digits)), "mean", (f"{name}_sum", f"{name}_count"))


@dataclass(frozen=True)
class Variance:
    """Keep the variance of a number column, of a sample or, with `population`, of all there is, rounded to `digits` decimals.

    It is NULL as long as there are too few values: a sample needs two. The sum, the sum of squares and the count that it is
    made of are kept beside it, exactly, as ``<name>_sum``, ``<name>_squares`` and ``<name>_count``. `scale` is the number of
    decimals of the input; with scale 2, a value may have 16 digits before the point, as 18 is the most in all.
    """

    column: str
    scale: int = 0
    digits: int = 6
    population: bool = False
    _formula: ClassVar[Formula] = "variance"

    def __post_init__(self) -> None:
        if not 0 <= self.scale <= SQUARED_DIGITS:
            raise ValueError(f"The scale of {self.column!r} is {self.scale}; use 0 to {SQUARED_DIGITS}, because it is squared.")

    def parts(self, name: str) -> Sequence[Part]:
        """Return the sum, the sum of squares and the count."""
        read_as = f"numeric({SQUARED_DIGITS},{self.scale})"
        return [
            Part(f"{name}_sum", _decimal(self.scale), "sum", "sum", self.column, read_as),
            Part(f"{name}_squares", _decimal(2 * self.scale), "sum", "sum_of_squares", self.column, read_as),
            Part(f"{name}_count", "bigint", "sum", "count", self.column),
        ]

    def derived(self, name: str) -> DerivedColumn:
        """Return the variance, or the standard deviation."""
        formulas: dict[Formula, Formula] = {"variance": "variance_pop", "stddev": "stddev_pop"}
        formula = formulas[self._formula] if self.population else self._formula
        made_of = (f"{name}_sum", f"{name}_squares", f"{name}_count")
        return DerivedColumn(name, ColumnType(_decimal(self.digits)), formula, made_of)


@dataclass(frozen=True)
class StdDev(Variance):
    """Keep the standard deviation of a number column: the root of the variance, and otherwise like `Variance`."""

    _formula = "stddev"


@dataclass(frozen=True)
class BoolAnd(Plain):
    """Keep whether a boolean column is true in all rows where it is not NULL; NULL until there is a value."""

    column: str

    def parts(self, name: str) -> Sequence[Part]:
        """Return the smallest value: false is less than true."""
        return [Part(name, "boolean", "min", "min", self.column)]


@dataclass(frozen=True)
class BoolOr(Plain):
    """Keep whether a boolean column is true in any row; NULL until there is a value."""

    column: str

    def parts(self, name: str) -> Sequence[Part]:
        """Return the largest value."""
        return [Part(name, "boolean", "max", "max", self.column)]


class _Bits(_Merged):
    def __post_init__(self) -> None:
        if self.type not in ("integer", "bigint"):
            raise ValueError(f"{type(self).__name__}({self.column!r}) cannot be kept as {self.type}: use bigint.")


@dataclass(frozen=True)
class BitAnd(_Bits):
    """Keep the bits that are set in all values of a whole-number column; NULL until there is a value."""

    _which = "bit_and"


@dataclass(frozen=True)
class BitOr(_Bits):
    """Keep the bits that are set in any value of a whole-number column; NULL until there is a value."""

    _which = "bit_or"


@dataclass(frozen=True)
class BitXor(_Bits):
    """Keep the bits that are set in an odd number of values of a whole-number column; NULL until there is a value."""

    _which = "bit_xor"


@dataclass(frozen=True)
class _FromOneRow(Plain):
    """A column's value from the row at one end of an order, and the ordering columns of that row."""

    column: str
    type: str
    by: Mapping[str, str]
    _which: ClassVar[Literal["first", "last"]]

    def parts(self, name: str) -> Sequence[Part]:
        """Return the ordering columns and the value."""
        if not self.by:
            raise ValueError(f"{name} needs at least one column in `by`, which says which row is the {self._which}.")
        ordering = {f"{name}_{column}": (column, kind) for column, kind in self.by.items()}
        return in_order(ordering, {name: (self.column, self.type)}, self._which)


@dataclass(frozen=True)
class First(_FromOneRow):
    """Keep a column's value from the first row in an order, which may be NULL.

    `by` maps the ordering columns to their Postgres types, the most significant first. They are kept too, as
    ``<name>_<column>``. Where rows are equal in all of them, the smallest value wins; a row that has NULL in one comes after
    those that have a value there.
    """

    _which = "first"


@dataclass(frozen=True)
class Last(_FromOneRow):
    """Keep a column's value from the last row in an order, which may be NULL.

    `by` maps the ordering columns to their Postgres types, the most significant first. They are kept too, as
    ``<name>_<column>``. Where rows are equal in all of them, the largest value wins; a row that has NULL in one comes before
    those that have a value there.
    """

    _which = "last"


@dataclass(frozen=True)
class _Collected(Plain):
    """Values of a column as an array."""

    column: str
    type: str
    most: int = 100
    _how: ClassVar[tuple[Merge, Function]]

    def parts(self, name: str) -> Sequence[Part]:
        """Return the array."""
        return [_array(name, self.type, *self._how, self.column, self.most)]


@dataclass(frozen=True)
class CollectSet(_Collected):
    """Keep the different values of a column, in their order, as an array; NULLs are left out.

    A key with more than `most` of them is refused, and its batch with it: nothing is dropped.
    """

    _how = "union", "collect_set"


@dataclass(frozen=True)
class CollectList(_Collected):
    """Keep all values of a column, repeated ones too, in their order, as an array; NULLs are left out.

    A key with more than `most` of them is refused, and its batch with it: nothing is dropped.
    """

    _how = "list", "collect_list"


@dataclass(frozen=True)
class _Ends(Plain):
    """The values at one end of a column's order as an array."""

    column: str
    count: int
    type: str = "bigint"
    _which: ClassVar[Literal["smallest", "largest"]]

    def parts(self, name: str) -> Sequence[Part]:
        """Return the array."""
        return [_array(name, self.type, self._which, self._which, self.column, self.count)]


@dataclass(frozen=True)
class Smallest(_Ends):
    """Keep the `count` smallest values of a column, repeated ones too, in ascending order, as an array."""

    _which = "smallest"


@dataclass(frozen=True)
class Largest(_Ends):
    """Keep the `count` largest values of a column (top-k), repeated ones too, in descending order, as an array."""

    _which = "largest"


@dataclass(frozen=True)
class Histogram(Plain):
    """Count the values of a number column between ascending bounds, as an array with one number more than there are bounds.

    The first number counts values below the first bound, the last one those from the last bound on; a value that equals a bound
    counts above it. NULLs are left out. `type` is that of the column.
    """

    column: str
    bounds: Sequence[int | str]
    type: str = "bigint"

    def __post_init__(self) -> None:
        bounds = self._bounds()
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"Histogram({self.column!r}) needs bounds in ascending order, not {list(self.bounds)}.")
        if len(bounds) >= MOST_ELEMENTS:
            raise ValueError(f"Histogram({self.column!r}) has {len(bounds)} bounds; at most {MOST_ELEMENTS - 1} are possible.")

    def parts(self, name: str) -> Sequence[Part]:
        """Return the counts."""
        return [Part(name, "bigint[]", "counts", "histogram", self.column, self.type, bounds=self._bounds())]

    def _bounds(self) -> tuple[Decimal, ...]:
        if any(isinstance(bound, float) for bound in self.bounds):
            raise TypeError(f"Histogram({self.column!r}): write a bound with decimals as text, such as '0.5'.")
        return tuple(Decimal(bound) for bound in self.bounds)


class Combiner(Plain, ABC):
    """An author's own aggregate of a column: a frozen dataclass that inherits this, whose fields are part of its meaning.

        @dataclass(frozen=True)
        class CappedSum(Combiner):
            column: str
            type: str = "bigint"
            zero = 0

            def partial(self, values):
                return F.least(F.sum(values), F.lit(1000))

            def combine(self, kept, new):
                return sa.func.least(kept + new, 1000)

    Both methods return expressions: Postgres merges whole batches under the cursor's lock, and no value travels to Python.

    It must give the same in any split and order of the rows: `combine` is associative and commutative, and `zero` changes
    nothing. `tidegate.jobs.testing.check_aggregate` tries that on an author's rows, with Spark and Postgres. Rounding breaks
    it.

    `type` is the Postgres type that is kept, `read_as` that of the column, if it differs. A value that does not fit exactly
    fails the batch.

    `zero` is the value of no values, or of NULLs alone. Without it, this is a reducer: NULL until there is a value.

    Raise `version` if the meaning of the code changes. Like any changed aggregate, it is then refused for a state that has
    committed batches. A pipeline with a combiner commits one batch at a time.
    """

    column: str
    type: str
    read_as: str | None = None
    zero: ClassVar[Any] = None
    version: ClassVar[int] = 1

    @abstractmethod
    def partial(self, values: "Column") -> "Column":
        """Return the value over the rows of a key in a batch, some of which have a value, as an aggregate of Spark."""

    @abstractmethod
    def combine(self, kept: "ColumnElement[Any]", new: "ColumnElement[Any]") -> "ColumnElement[Any]":
        """Return the value of both, as an expression of SQLAlchemy. Neither is NULL. What does not fit is an `Overflow`."""

    def parts(self, name: str) -> Sequence[Part]:
        """Return the kept column."""
        if not is_dataclass(self):
            raise TypeError(f"{type(self).__name__} has to be a frozen dataclass: its fields are part of the declaration.")
        return [Part(name, self.type, "own", "own", self.column, self.read_as, combiner=self)]


def _decimal(scale: int) -> str:
    return f"numeric(38,{scale})"


def _array(name: str, element: str, merge: Merge, function: Function, column: str, most: int) -> Part:
    if not 1 <= most <= MOST_ELEMENTS:
        raise ValueError(f"{name} would keep up to {most} values of {column!r}; use 1 to {MOST_ELEMENTS}.")
    return Part(name, f"{element}[]", merge, function, column, element, most=most)


def in_order(
    ordering: Mapping[str, TypedColumn], values: Mapping[str, TypedColumn], which: Literal["first", "last"]
) -> list[Part]:
    """Return the parts that keep the first or last row: `ordering` decides, and where that is equal, the values do.

    Both map names of kept columns to the column of the rows and its Postgres type.
    """
    columns = {**ordering, **values}
    return [Part(name, kind, which, which, column, order=tuple(columns)) for name, (column, kind) in columns.items()]
