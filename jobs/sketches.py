"""Sketches: aggregates of a bounded size whose value is an estimate with a stated error.

A sketch itself is exact: an array of bits or counts that is merged by OR or by addition, so any order and split of the rows
gives the same array (I16). Only the values that Postgres derives from it are estimates.

    ApproxDistinct     bits: whether hashes of values end with 0, 1, 2 ... zeros, after Flajolet and Martin
    ApproxQuantiles    counts of the values by size, in ranges whose width grows with the size
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import ceil, log

from tidegate.jobs.aggregates import MOST_ELEMENTS, Part
from tidegate.state_store.declarations.column_spec import ColumnType, DerivedColumn

RANKS = 32  # rows of a bitmap: the hash of a value sets one bit, in row n (from 1) with a probability of 2^-n
WORD_BITS = 64
WHOLE_DIGITS = 18  # any number of so many digits fits into a bigint
EXACT_DIGITS = 2  # decimals that a quantile has in addition to its column's, so that rounding does not add to the error
LARGEST_PRODUCT = 2**61  # of the largest number and the ranges per octave, which are multiplied as bigint


@dataclass(frozen=True)
class ApproxDistinct:
    """Estimate how many different values a column has, as bigint; NULLs are left out.

    `error` is the relative standard error: two thirds of the estimates are within it, and 19 of 20 within twice that. Up to
    about ten values, the estimate is nearly always exact. `type` is that of the column, such as text.

    The sketch is stored as column ``<name>_bits``: about 2 kB per key for an error of 0.03, and 19 kB for 0.01.
    """

    column: str
    type: str
    error: float = 0.03

    def __post_init__(self) -> None:
        if not 0.01 <= self.error <= 0.3:
            raise ValueError(f"ApproxDistinct({self.column!r}) has an error of {self.error}; it must be from 0.01 to 0.3.")
        if ColumnType(self.type).element:
            raise ValueError(f"ApproxDistinct({self.column!r}) counts values of one column, not arrays: {self.type}.")

    def parts(self, name: str) -> Sequence[Part]:
        """Return the bits, as 64-bit words."""
        # The standard error is log(2) / sqrt(columns). A column has RANKS bits, so an even number of columns fills whole words.
        columns = 2 * ceil((log(2) / self.error) ** 2 / 2)
        return [Part(f"{name}_bits", "bigint[]", "bits", "distinct_bits", self.column, self.type, sizes=(columns,))]

    def derived(self, name: str) -> DerivedColumn:
        """Return the estimate."""
        return DerivedColumn(name, ColumnType("bigint"), "distinct", (f"{name}_bits",))


@dataclass(frozen=True)
class ApproxQuantiles:
    """Estimate quantiles of a numeric column, as columns ``<name>_p50``, ``<name>_p99`` ...; NULLs are left out.

    A quantile is the smallest value that at least this share of all values does not exceed. The relative error of an estimate
    is at most `error`, for absolute values up to `most`. It is NULL without values, and if the quantile is out of range: above
    `most` or, unless negative values are allowed (`signed`), below 0.

    `type` is that of the column: integer, bigint, or numeric of at most 18 digits. Zero, and numbers of few digits, are exact.
    The counts are stored as column ``<name>_counts``: for an error of 0.01, about 400 bytes per factor of two from the type's
    smallest positive value to `most`, and twice that if `signed`.
    """

    column: str
    most: int
    type: str = "bigint"
    probabilities: Sequence[float | str] = (0.5, 0.9, 0.99)
    error: float = 0.01
    signed: bool = False

    def __post_init__(self) -> None:
        label = f"ApproxQuantiles({self.column!r})"
        digits, _ = ColumnType(self.type).precision_and_scale or (0, 0)
        if self.type not in ("integer", "bigint") and not 1 <= digits <= WHOLE_DIGITS:
            raise ValueError(
                f"{label} cannot read {self.type}: use integer, bigint, or numeric of up to {WHOLE_DIGITS} digits."
            )
        if not 0.001 <= self.error <= 0.3:
            raise ValueError(f"{label} has an error of {self.error}; it must be from 0.001 to 0.3.")
        if not self.probabilities or not all(0 < probability < 1 for probability in self._decimal_probabilities()):
            raise ValueError(f"{label} needs probabilities between 0 and 1, such as 0.99, not {list(self.probabilities)}.")
        if self.most < 1 or self._most_units * self._per_octave >= LARGEST_PRODUCT:
            raise ValueError(f"{label} has a range up to {self.most}; use at least 1, and at most what {self.type} can hold.")
        if self._count > MOST_ELEMENTS:
            raise ValueError(
                f"{label} would keep {self._count} counts per key; at most {MOST_ELEMENTS} are possible. Allow a larger error, "
                "or declare a smaller range, or fewer decimals."
            )

    def parts(self, name: str) -> Sequence[Part]:
        """Return the counts."""
        sizes = (self._per_octave, self._most_units, self._negative_ranges, self._scale)
        return [Part(f"{name}_counts", "bigint[]", "counts", "size_counts", self.column, self.type, sizes=sizes)]

    def derived(self, name: str) -> Sequence[DerivedColumn]:
        """Return the quantiles."""
        made_of, sizes = (f"{name}_counts",), (self._per_octave, self._negative_ranges, self._scale)
        kind = ColumnType(f"numeric(38,{self._scale + EXACT_DIGITS})")
        return [
            DerivedColumn(f"{name}_p{_suffix(probability)}", kind, "quantile", made_of, (str(probability), *sizes))
            for probability in self._decimal_probabilities()
        ]

    def _decimal_probabilities(self) -> Iterator[Decimal]:
        return (Decimal(str(probability)).normalize() for probability in self.probabilities)

    @property
    def _per_octave(self) -> int:
        """The number of ranges from one power of two to the next, so that a range's middle is within `error` of its values."""
        return ceil(Decimal("0.505") / Decimal(str(self.error)))

    @property
    def _scale(self) -> int:
        precision_and_scale = ColumnType(self.type).precision_and_scale
        return precision_and_scale[1] if precision_and_scale else 0

    @property
    def _most_units(self) -> int:
        units: int = self.most * 10**self._scale
        return units

    @property
    def _ranges(self) -> int:
        return size_of(self._most_units, self._per_octave) + 1

    @property
    def _negative_ranges(self) -> int:
        return self._ranges if self.signed else 0

    @property
    def _count(self) -> int:
        return length_of(self._ranges, self._negative_ranges)


def size_of(units: int, per_octave: int) -> int:
    """Return the index of a positive number's range; the number is in units of its last digit."""
    octave = units.bit_length() - 1
    return octave * per_octave + ((units - (1 << octave)) * per_octave >> octave)


def length_of(sizes: int, negatives: int) -> int:
    """Return the number of counts: one below all ranges, then negative ranges, zero, positive ranges, one above."""
    return negatives + sizes + 3


def _suffix(probability: Decimal) -> str:
    """Return the end of a column's name: 50 for 0.5, 999 for 0.999, 05 for 0.05."""
    return f"{probability:f}".removeprefix("0.").ljust(2, "0")
