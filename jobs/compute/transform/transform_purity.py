"""Purity: a transform must be a function of its rows, which its plan shows without asking Spark's server."""

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from pyspark.sql import DataFrame

from tidegate.jobs.spark.library_internals import plan_of
from tidegate.state_store.base.errors import DeclarationInvalid

logger = logging.getLogger(__name__)

# Functions whose values differ each time, or depend on how Spark happened to share the rows among its tasks.
_FUNCTIONS = frozenset(
    {
        *("rand", "random", "randn", "randstr", "uniform", "uuid", "shuffle"),
        *("monotonically_increasing_id", "spark_partition_id", "distributed_sequence_id", "distributed_id"),
        *("current_timestamp", "current_date", "current_time", "localtimestamp", "now", "curdate"),
    }
)
# SQL calls some of these without brackets, unless a column has the name; _CLOCK reads the clock only without an argument.
_BARE = frozenset({"current_timestamp", "current_date", "current_time", "localtimestamp"})
_CLOCK = "unix_timestamp"
_RELATIONS = {"limit": "limit()", "offset": "offset()", "tail": "tail()", "sample": "sample()", "sample_by": "sampleBy()"}
_NAMES_IN_PYTHON = {"distributed_sequence_id": "zipWithIndex"}  # what authors write
_UNION = 2  # pyspark.sql.connect.proto.SetOperation.SET_OP_TYPE_UNION
_QUOTED = re.compile(r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\"|`(?:[^`]|``)*`")
_CALL = re.compile(r"\b([a-z_]\w*)\b\s*(\(\s*\)|\()?", re.IGNORECASE)


def check_pure(rows: Sequence[DataFrame], returned: DataFrame, columns: Collection[str]) -> None:
    """Refuse a transform whose result differs each time it runs; warn if it may differ.

    `rows` are the DataFrames that the transform got, `columns` their columns.

    Raises: DeclarationInvalid.
    """
    operations = set(_impure_in_message(*plan_of(returned, rows), columns))
    if refused := sorted(name for name in operations if name):
        raise DeclarationInvalid(
            f"The transform uses {', '.join(refused)}: what that gives depends on when it runs, or on how Spark shares rows "
            "among tasks, so a batch that is tried again would be another batch. Take it out; or have the source's rows "
            "carry what is needed, such as a time of their own."
        )
    if "" in operations:
        logger.warning(
            "The transform keeps some of several rows: by dropDuplicates() over some columns, or limit() of sorted rows. "
            "If these differ in other columns, or are equal in the order, which of them stays is not the same each time."
        )


def unread(returned: DataFrame, frames: Mapping[str, DataFrame]) -> list[str]:
    """Return the names of the frames that the transform's plan does not read."""
    plan, numbers = plan_of(returned, list(frames.values()))
    reached = _reached(plan, numbers)
    return [name for name, number in zip(frames, numbers, strict=True) if number not in reached]


def meeting(returned: DataFrame, inputs: Mapping[str, DataFrame]) -> tuple[str, str] | None:
    """Return two inputs whose rows a transform joins, or brings together otherwise than by uniting them; None without such."""
    message, numbers = plan_of(returned, list(inputs.values()))
    return next(_meetings(message, dict(zip(numbers, inputs, strict=True))), None)


def _meetings(message: Any, inputs: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of inputs, by the numbers of their plans, that a relation of several others brings together."""
    is_relation = message.DESCRIPTOR.name == "Relation"
    if is_relation and message.HasField("common") and message.common.plan_id in inputs:
        return
    inner = list(_relations_in(message))
    is_union = is_relation and message.WhichOneof("rel_type") == "set_op" and message.set_op.set_op_type == _UNION
    if is_relation and not is_union:
        yield from _different([{inputs[number] for number in _reached(each, inputs)} for each in inner])
    for each in inner:
        yield from _meetings(each, inputs)


def _relations_in(message: Any) -> Iterator[Any]:
    """Yield the nearest relations inside a message."""
    for part in _inner_messages(message):
        if part.DESCRIPTOR.name == "Relation":
            yield part
        else:
            yield from _relations_in(part)


def _different(reached: Sequence[set[str]]) -> Iterator[tuple[str, str]]:
    for some, others in combinations(reached, 2):
        yield from ((one, other) for one in sorted(some) for other in sorted(others) if one != other)


def _reached(message: Any, sources: Collection[int]) -> set[int]:
    """Return those of the sources, by their plans' numbers, that a message contains."""
    if message.DESCRIPTOR.name == "Relation" and message.HasField("common") and message.common.plan_id in sources:
        return {message.common.plan_id}
    return {number for part in _inner_messages(message) for number in _reached(part, sources)}


def _impure_in_message(message: Any, sources: Collection[int], columns: Collection[str]) -> Iterator[str]:
    """Yield the impure operations of a Spark Connect plan, down to the plans of the source; "" for a possibly impure one."""
    if message.DESCRIPTOR.name == "Relation":
        if message.HasField("common") and message.common.plan_id in sources:
            return
        yield from _impure_in_relation(message)
    elif message.DESCRIPTOR.name == "Expression":
        yield from _impure_in_expression(message, columns)
    for part in _inner_messages(message):
        yield from _impure_in_message(part, sources, columns)


def _impure_in_relation(relation: Any) -> Iterator[str]:
    kind = relation.WhichOneof("rel_type")
    if (kind == "limit" and relation.limit.input.HasField("sort")) or (
        kind == "deduplicate" and not relation.deduplicate.all_columns_as_keys
    ):
        yield ""
    elif kind in _RELATIONS:
        yield _RELATIONS[kind]


def _impure_in_expression(expression: Any, columns: Collection[str]) -> Iterator[str]:
    kind = expression.WhichOneof("expr_type")
    if kind == "expression_string":
        yield from _impure_in_sql(expression.expression_string.expression, columns)
    elif kind in ("unresolved_function", "call_function"):
        called = getattr(expression, kind)
        name = called.function_name.lower().rpartition(".")[2].strip("`")  # call_function() takes it as SQL writes it
        if name in _FUNCTIONS or (name == _CLOCK and not called.arguments):
            yield f"{_NAMES_IN_PYTHON.get(name, name)}()"


def _inner_messages(message: Any) -> Iterator[Any]:
    """Yield the messages directly inside a message."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            yield from (part for part in value.values() if hasattr(part, "ListFields"))
        elif hasattr(value, "ListFields"):
            yield value
        else:
            yield from value


def _impure_in_sql(text: str, columns: Collection[str]) -> Iterator[str]:
    column_names = {column.lower() for column in columns}
    for called, brackets in _CALL.findall(_QUOTED.sub("", text)):
        name = called.lower()
        if (name in _FUNCTIONS and (brackets or (name in _BARE and name not in column_names))) or (
            name == _CLOCK and brackets.endswith(")")
        ):
            yield f"{name}()"
