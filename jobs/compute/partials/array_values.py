"""Arrays of a key's values, as the text that Postgres reads."""

from itertools import pairwise

from pyspark.sql import Column
from pyspark.sql import functions as F

from tidegate.jobs.aggregates import Part
from tidegate.jobs.compute.partials import sketch_values
from tidegate.jobs.spark.task_errors import refusal
from tidegate.state_store.base.errors import Overflow

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
        return sketch_values.partial(part, column)
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
