"""Flag the records of a source that fail one of the author's conditions, or that no state could keep."""

from collections.abc import Mapping, Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from tidegate.jobs.compute.stage.unstorable_values import MAX_KEY_BYTES, MAX_VALUE_BYTES
from tidegate.jobs.sources import REFUSAL
from tidegate.jobs.sources.column_types import quoted
from tidegate.jobs.states import AnyState


def with_checks(records: DataFrame, checks: Mapping[str, str], storable: Sequence[AnyState] = ()) -> DataFrame:
    """Flag the records that fail one of the author's checks, with the first such check as the reason.

    Records whose keys or texts one of the `storable` states cannot keep are flagged too: these states are computed without a
    transform, so it is known which record is at fault.
    """
    refusal = F.when(F.col(REFUSAL).isNotNull(), F.col(REFUSAL))
    for name, condition in checks.items():
        refusal = refusal.when(~F.coalesce(F.expr(condition), F.lit(False)), F.lit(f"fails the check {name!r}"))
    columns = {field.name: field.dataType for field in records.schema} if storable else {}
    all_texts = {name for name, kind in columns.items() if isinstance(kind, T.StringType)}
    for state in storable:
        texts = state.keyed_by.keys() & all_texts
        values = {part.column for part in state.parts if part.column and part.function != "count"} & all_texts
        for name, what in state.required.items():
            if name in columns:
                refusal = refusal.when(F.col(quoted(name)).isNull(), F.lit(f"{what} {name} is NULL"))
        for name, limit in (dict.fromkeys(values, MAX_VALUE_BYTES) | dict.fromkeys(texts, MAX_KEY_BYTES)).items():
            text = F.col(quoted(name))
            refusal = refusal.when(F.contains(text, F.lit("\0")), F.lit(f"column {name} holds a NUL character"))
            too_long = F.concat(F.lit(f"column {name} takes "), F.octet_length(text), F.lit(f" bytes, the limit is {limit}"))
            refusal = refusal.when(F.octet_length(text) > limit, too_long)
    return records.withColumn(REFUSAL, refusal)
