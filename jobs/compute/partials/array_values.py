"""Arrays of a key's values, and sketches of these: arrays of a bounded size, as the text that Postgres reads.

Spark's memory per key is that of all values, or of the sketch. Spark's own sketches (HyperLogLog, theta, KLL) are bytes that
depend on the order of the rows, and that Postgres cannot merge.
"""

from decimal import Decimal
from itertools import pairwise

from pyspark.sql import Column
from pyspark.sql import functions as F

from tidegate.jobs.aggregates import Part
from tidegate.jobs.sketches import RANKS, WORD_BITS, length_of, size_of
from tidegate.jobs.spark.task_errors import refusal
from tidegate.state_store.base.errors import Overflow

BITMAP_WORDS = 512  # of one bitmap of Spark
HALF_BITS = 32
WORD_BYTES = WORD_BITS // 8
# Times with their zone, where they have one, and all their digits.
_TIMES = {
    "date": "yyyy-MM-dd",
    "timestamptz": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestamp": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def partial(part: Part, column: Column, place: str) -> Column:
    """Return the array of a part over the rows of a key, in its order. Spark holds all values of a key in memory first.

    More values than the part keeps fail the query with Overflow; Smallest and Largest keep the first ones.
    """
    if part.sizes:
        return _sketch(part, column)
    if part.function == "histogram":
        return _text(F.array(*_counts(part, column)), "bigint", place)
    values = F.collect_set(column) if part.function == "collect_set" else F.collect_list(column)
    values = F.sort_array(values, asc=part.function != "largest")
    kind = part.read_as or ""
    assert part.most is not None, "only a histogram has no limit"
    if part.function in ("smallest", "largest"):
        return _text(F.slice(values, 1, part.most), kind, place)
    too_many = F.concat(F.size(values).cast("string"), F.lit(f" values of a key, and keeps at most {part.most}"))
    return F.when(F.size(values) <= part.most, _text(values, kind, place)).otherwise(_refuse(place, too_many))


def _refuse(place: str, misfit: Column) -> Column:
    """Return an expression that fails the query with Overflow: the array cannot have what is a `misfit`."""
    message = (
        "{place} would have {misfit}. Nothing is dropped or cut: leave such rows out in the transform, or declare another "
        "aggregate, and rebuild the pipeline."
    )
    return refusal(Overflow, message, place=F.lit(place), misfit=misfit).cast("string")


def _counts(part: Part, column: Column) -> list[Column]:
    bounds = [F.lit(bound) for bound in part.bounds]
    below = [column < bound for bound in bounds]
    # A value is in the first range whose upper bound is above it.
    ranges = [below[0], *(~lower & upper for lower, upper in pairwise(below)), ~below[-1]]
    return [F.count_if(within) for within in ranges]


def _text(values: Column, kind: str, place: str) -> Column:
    def written(value: Column) -> Column:
        if kind == "text":
            quoted = F.replace(F.replace(value, F.lit("\\"), F.lit("\\\\")), F.lit('"'), F.lit('\\"'))
            return F.concat(F.lit('"'), quoted, F.lit('"'))
        if kind not in _TIMES:
            return value.cast("string")
        far = F.concat(F.lit("the value "), value.cast("string"), F.lit(". Years are kept from 1 to 9999"))
        return F.when(F.year(value).between(1, 9999), F.date_format(value, _TIMES[kind])).otherwise(_refuse(place, far))

    return F.concat(F.lit("{"), F.array_join(F.transform(values, written), ","), F.lit("}"))


def _sketch(part: Part, column: Column) -> Column:
    return _bits(column, *part.sizes) if part.function == "distinct_bits" else _counts_by_size(column, *part.sizes)


def _bits(column: Column, columns: int) -> Column:
    """Return words of bits: each value sets one, in a row and column that follow from its hash."""
    value_hash = F.xxhash64(column)
    low = value_hash.bitwiseAND(F.lit(2**HALF_BITS - 1))
    high = F.shiftrightunsigned(value_hash, HALF_BITS)
    # The number of zeros at the end, which the last row cuts off.
    zeros = F.least(F.bit_count(F.bitwise_not(high).bitwiseAND(high - 1)), F.lit(RANKS - 1))
    place = F.when(column.isNotNull(), zeros * F.lit(columns).cast("bigint") + low % columns)
    words = RANKS * columns // WORD_BITS
    arrays = []
    for first in range(0, words, BITMAP_WORDS):
        bit = place - F.lit(first * WORD_BITS)
        bitmap = F.bitmap_construct_agg(F.when(bit.between(0, BITMAP_WORDS * WORD_BITS - 1), bit))
        arrays.append(_words(bitmap, min(BITMAP_WORDS, words - first)))
    return F.concat(F.lit("{"), F.array_join(F.concat(*arrays), ","), F.lit("}"))


def _words(bitmap: Column, count: int) -> Column:
    """Return the first words of a bitmap as numbers with a sign; cutting bytes is quicker than cutting hex digits."""

    def word(number: Column) -> Column:
        return F.conv(F.hex(F.substring(bitmap, number * WORD_BYTES + 1, F.lit(WORD_BYTES))), 16, -10)

    return F.transform(F.sequence(F.lit(0), F.lit(count - 1)), word)


def _counts_by_size(column: Column, per_octave: int, most: int, negatives: int, scale: int) -> Column:
    """Return counts of values by their size (`tidegate.jobs.sketches.size_of`), after numbers are scaled to whole ones."""
    units = (column * F.lit(Decimal(10**scale))).cast("bigint")
    size = F.least(F.abs(F.greatest(F.least(units, F.lit(most)), F.lit(-most))), F.lit(most))
    octave = F.length(F.bin(size)) - 1
    start = F.call_function("shiftleft", F.lit(1).cast("bigint"), octave)
    number = octave * per_octave + F.call_function("shiftright", (size - start) * per_octave, octave) + 1
    length = length_of(size_of(most, per_octave) + 1, negatives)
    place = (
        F.when(column.isNull(), F.lit(None))  # which least and greatest leave out
        .when(units > most, F.lit(length - 1))
        .when(units < (-most if negatives else 0), F.lit(0))
        .when(size == 0, F.lit(negatives + 1))
        .otherwise(F.when(units < 0, -number).otherwise(number) + (negatives + 1))
    )
    # With as many bins as there are places, none is joined with another: the counts are exact.
    bins = F.histogram_numeric(place.cast("int"), F.lit(length))
    pairs = F.coalesce(F.array_sort(bins), F.array().cast("array<struct<x:int,y:double>>"))
    return F.concat(F.lit("{"), _dense(pairs, length), F.lit("}"))


def _dense(bins: Column, length: int) -> Column:
    """Return a count per place as text, of pairs of place and count in the order of the places; a place may come repeatedly."""

    def with_last(state: Column) -> Column:
        return F.when(state.place < 0, F.lit("")).otherwise(F.concat(state.text, state.n.cast("string"), F.lit(",")))

    def add(state: Column, each: Column) -> Column:
        n = each.y.cast("bigint")
        gap = F.repeat(F.lit("0,"), each.x - state.place - 1)
        return F.when(each.x == state.place, _struct(state.text, state.place, state.n + n)).otherwise(
            _struct(F.concat(with_last(state), gap), each.x, n)
        )

    def finish(state: Column) -> Column:
        zeros = F.repeat(F.lit("0,"), F.lit(length - 1) - state.place)
        return F.rtrim(F.concat(with_last(state), zeros), F.lit(","))

    nothing = _struct(F.lit(""), F.lit(-1), F.lit(0).cast("bigint"))
    return F.aggregate(bins, nothing, add, finish)


def _struct(text: Column, place: Column, n: Column) -> Column:
    return F.struct(text.alias("text"), place.alias("place"), n.alias("n"))
