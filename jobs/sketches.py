"""Sketches: aggregates of a bounded size whose value is an estimate with a stated error.

What is kept is exact: arrays of bits or counts that are merged by OR or by addition, so a state is the same bit by bit in any
order and split of the rows (I16). Only the values that Postgres derives from them are estimates.

    ApproxDistinct     bits: how often the hashes of the values begin with one, two, three ... zeros, after Flajolet and Martin
    ApproxQuantiles    counts of the values by size, in ranges that grow with the size
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import ceil, log

from jobs.aggregates import MOST_ELEMENTS, Part
from state_store.columns import ColumnType, DerivedColumn

RANKS = 32  # rows of a bitmap: a value that is hashed sets one bit, in row n with a probability of 2^-n
WORD_BITS = 64
WHOLE_DIGITS = 18  # of a number that always fits into a bigint
EXACT_DIGITS = 2  # more decimals of a quantile than its column has: then rounding it does not add to the error
LARGEST_PRODUCT = 2**61


@dataclass(frozen=True)
class ApproxDistinct:
    """Estimate how many different values a column has; NULLs are left out. Kept as bigint.

    `error` is the standard error: two thirds of the estimates are closer to the truth than that, and 19 of 20 closer than twice
    that. Up to some ten values, the estimate is nearly always exact. `type` is that of the column, such as text.

    The sketch is kept beside it as ``<name>_bits``: some 2 kB per key for an error of 0.03, and 19 kB for 0.01.
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
        """Return the bits, in words of 64."""
        # The standard error of this estimate is log(2) over the root of the number of columns. An even one fills whole words.
        columns = 2 * ceil((log(2) / self.error) ** 2 / 2)
        return [Part(f"{name}_bits", "bigint[]", "bits", "distinct_bits", self.column, self.type, sizes=(columns,))]

    def derived(self, name: str) -> DerivedColumn:
        """Return the estimate."""
        return DerivedColumn(name, ColumnType("bigint"), "distinct", (f"{name}_bits",))


@dataclass(frozen=True)
class ApproxQuantiles:
    """Estimate quantiles of a number column, each as ``<name>_p50``, ``<name>_p99`` ...; NULLs are left out.

    A quantile is the smallest value that at least this share of all values does not exceed. An estimate differs from it by at
    most `error` of it, up to the size `most`. It is NULL without values, and where it is beyond the range: above `most` or,
    unless the values may be negative (`signed`), below 0.

    `type` is that of the column: integer, bigint, or numeric of at most 18 digits. Zero, and numbers of few digits, are exact.
    The counts that the estimates are made of are kept beside them as ``<name>_counts``: for an error of 0.01, some 400 bytes
    per factor of two from the smallest positive value of the type to `most`, and twice that if they are signed.
    """

    column: str
    most: int
    type: str = "bigint"
    probabilities: Sequence[float | str] = (0.5, 0.9, 0.99)
    error: float = 0.01
    signed: bool = False

    def __post_init__(self) -> None:
        me = f"ApproxQuantiles({self.column!r})"
        digits, _ = ColumnType(self.type).precision_and_scale or (0, 0)
        if self.type not in ("integer", "bigint") and not 1 <= digits <= WHOLE_DIGITS:
            raise ValueError(f"{me} cannot read {self.type}: use integer, bigint, or numeric of up to {WHOLE_DIGITS} digits.")
        if not 0.001 <= self.error <= 0.3:
            raise ValueError(f"{me} has an error of {self.error}; it must be from 0.001 to 0.3.")
        if not self.probabilities or not all(0 < chance < 1 for chance in self._chances()):
            raise ValueError(f"{me} needs probabilities between 0 and 1, such as 0.99, not {list(self.probabilities)}.")
        if self.most < 1 or self._most_units * self._per_octave >= LARGEST_PRODUCT:
            raise ValueError(f"{me} has a range up to {self.most}; use at least 1, and at most what {self.type} can hold.")
        if self._length > MOST_ELEMENTS:
            raise ValueError(
                f"{me} would keep {self._length} counts per key; at most {MOST_ELEMENTS} are possible. Allow a larger error, "
                "or declare a smaller range, or fewer decimals."
            )

    def parts(self, name: str) -> Sequence[Part]:
        """Return the counts."""
        sizes = (self._per_octave, self._most_units, self._negatives, self._scale)
        return [Part(f"{name}_counts", "bigint[]", "counts", "size_counts", self.column, self.type, sizes=sizes)]

    def derived(self, name: str) -> Sequence[DerivedColumn]:
        """Return the quantiles."""
        made_of, sizes = (f"{name}_counts",), (self._per_octave, self._negatives, self._scale)
        kind = ColumnType(f"numeric(38,{self._scale + EXACT_DIGITS})")
        return [
            DerivedColumn(f"{name}_p{_percent(chance)}", kind, "quantile", made_of, (str(chance), *sizes))
            for chance in self._chances()
        ]

    def _chances(self) -> Iterator[Decimal]:
        return (Decimal(str(chance)).normalize() for chance in self.probabilities)

    @property
    def _per_octave(self) -> int:
        """The number of ranges from a power of two to the next; a range's middle differs from its values by at most `error`."""
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
    def _sizes(self) -> int:
        return size_of(self._most_units, self._per_octave) + 1

    @property
    def _negatives(self) -> int:
        return self._sizes if self.signed else 0

    @property
    def _length(self) -> int:
        return length_of(self._sizes, self._negatives)


def size_of(units: int, per_octave: int) -> int:
    """Return the range, counted from 0, of a positive number, given in units of its last digit."""
    octave = units.bit_length() - 1
    return octave * per_octave + ((units - (1 << octave)) * per_octave >> octave)


def length_of(sizes: int, negatives: int) -> int:
    """Return the number of counts: one below the range, negative sizes from the largest on, zero, sizes, one above."""
    return negatives + sizes + 3


def _percent(chance: Decimal) -> str:
    """Return a probability as in a column's name: 50 for 0.5, 999 for 0.999, 05 for 0.05."""
    return f"{chance:f}".removeprefix("0.").ljust(2, "0")
