"""Purity: a transform must be a function of its rows, which its plan shows without asking Spark's server."""

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from pyspark.sql import DataFrame

from tidegate.jobs.spark.library_internals import plan_of
from tidegate.state_store.base.errors import DeclarationInvalid

logger = logging.getLogger(__name__)

# Functions whose values differ each time, or by account, or depend on how Spark happened to share the rows among its tasks.
_FUNCTIONS = frozenset(
    {
        *("rand", "random", "randn", "randstr", "uniform", "uuid", "shuffle"),
        *("monotonically_increasing_id", "spark_partition_id", "distributed_sequence_id", "distributed_id"),
        *("current_timestamp", "current_date", "current_time", "localtimestamp", "now", "curdate"),
        *("current_user", "session_user", "user"),
    }
)
# SQL calls some of these without brackets, unless a column has the name; many are named `user`. _CLOCK reads the clock only
# without an argument.
_BARE = frozenset({"current_timestamp", "current_date", "current_time", "localtimestamp", "current_user", "session_user"})
_CLOCK = "unix_timestamp"
# Functions whose values depend on the order of rows wherever no order, or an order with equal rows, is given.
_COLLECTING = frozenset({"collect_list", "collect_set", "array_agg"})
_CHOOSING = _COLLECTING | {
    *("first", "first_value", "last", "last_value", "any_value", "nth_value", "mode", "max_by", "min_by"),
    *("listagg", "string_agg", "row_number", "ntile", "lag", "lead", "percentile_approx", "approx_percentile"),
    *("approx_top_k", "histogram_numeric", "hll_sketch_agg", "theta_sketch_agg", "tuple_sketch_agg_double"),
    *("tuple_sketch_agg_integer", "kll_sketch_agg_bigint", "kll_sketch_agg_double", "kll_sketch_agg_float"),
}
# Functions of an array to which the order of its elements is indifferent.
_UNORDERED = frozenset(
    {"sort_array", "array_sort", "size", "array_size", "cardinality", "array_contains", "array_max", "array_min"}
)
_RELATIONS = {"limit": "limit()", "offset": "offset()", "tail": "tail()", "sample": "sample()", "sample_by": "sampleBy()"}
_NAMES_IN_PYTHON = {"distributed_sequence_id": "zipWithIndex"}  # what authors write
_UNION = 2  # pyspark.sql.connect.proto.SetOperation.SET_OP_TYPE_UNION
_QUOTED = re.compile(r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\"|`(?:[^`]|``)*`")
_CALL = re.compile(r"\b([a-z_]\w*)\b\s*(\(\s*\)|\()?", re.IGNORECASE)
_CLAUSES = {"limit": re.compile(r"\blimit\s", re.IGNORECASE), "sample": re.compile(r"\btablesample\b", re.IGNORECASE)}


class _Impure(NamedTuple):
    """An operation whose result differs each time, or, if it is not certain, only where rows have no unique order."""

    name: str
    is_certain: bool = True


def check_pure(rows: Sequence[DataFrame], returned: DataFrame, columns: Collection[str]) -> None:
    """Refuse a transform whose result differs each time it runs; warn if it may differ.

    `rows` are the DataFrames that the transform got, `columns` their columns.

    Raises: DeclarationInvalid.
    """
    operations = set(_impure_in_message(*plan_of(returned, rows), columns))
    if refused := sorted(found.name for found in operations if found.is_certain):
        raise DeclarationInvalid(
            f"The transform uses {', '.join(refused)}: what that gives depends on when and for whom it runs, or how Spark "
            "shares rows among tasks, so a batch that is tried again would be another batch. Take it out; or have the source's "
            "rows carry what is needed, such as a time of their own."
        )
    if operations:
        logger.warning(
            "The transform uses %s: that keeps some of several rows, or the order in which they come. Where no order tells "
            "these rows apart, what comes out is not the same each time.",
            ", ".join(sorted(found.name for found in operations)),
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


def _impure_in_message(message: Any, sources: Collection[int], columns: Collection[str]) -> Iterator[_Impure]:
    """Yield the impure operations of a Spark Connect plan, down to the plans of the source."""
    called = ""
    if message.DESCRIPTOR.name == "Relation":
        if message.HasField("common") and message.common.plan_id in sources:
            return
        yield from _impure_in_relation(message, columns)
    elif message.DESCRIPTOR.name == "Expression":
        called = _called(message)
        yield from _impure_in_expression(message, called, columns)
    for part in _inner_messages(message):
        for found in _impure_in_message(part, sources, columns):
            if called not in _UNORDERED or found.name.removesuffix("()") not in _COLLECTING:
                yield found


def _impure_in_relation(relation: Any, columns: Collection[str]) -> Iterator[_Impure]:
    kind = relation.WhichOneof("rel_type")
    if kind == "limit" and relation.limit.input.HasField("sort"):
        yield _Impure("limit() of sorted rows", is_certain=False)
    elif kind == "deduplicate" and not relation.deduplicate.all_columns_as_keys:
        yield _Impure("dropDuplicates() over some columns", is_certain=False)
    elif kind == "sql":
        yield from _impure_in_sql(relation.sql.query, columns)
    elif kind in _RELATIONS:
        yield _Impure(_RELATIONS[kind])


def _called(expression: Any) -> str:
    """Return the name of the function that an expression calls; "" for another expression."""
    kind = expression.WhichOneof("expr_type")
    if kind not in ("unresolved_function", "call_function"):
        return ""
    name: str = getattr(expression, kind).function_name
    return name.lower().rpartition(".")[2].strip("`")  # call_function() takes it as SQL writes it


def _impure_in_expression(expression: Any, name: str, columns: Collection[str]) -> Iterator[_Impure]:
    kind = expression.WhichOneof("expr_type")
    if kind == "expression_string":
        yield from _impure_in_sql(expression.expression_string.expression, columns)
    elif name:
        arguments = getattr(expression, kind).arguments
        if name in _FUNCTIONS or (name == _CLOCK and not arguments):
            yield _Impure(f"{_NAMES_IN_PYTHON.get(name, name)}()")
        elif name in _CHOOSING and not (name == "mode" and len(arguments) > 1 and arguments[1].literal.boolean):
            yield _Impure(f"{name}()", is_certain=False)


def _inner_messages(message: Any) -> Iterator[Any]:
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            yield from (part for part in value.values() if hasattr(part, "ListFields"))
        elif hasattr(value, "ListFields"):
            yield value
        else:
            yield from value


def _impure_in_sql(text: str, columns: Collection[str]) -> Iterator[_Impure]:
    column_names = {column.lower() for column in columns}
    unquoted = _QUOTED.sub("", text)
    yield from (_Impure(f"{name}()", name == "sample") for name, clause in _CLAUSES.items() if clause.search(unquoted))
    calls = _CALL.findall(unquoted)
    has_order = any(called.lower() in _UNORDERED for called, _ in calls)
    for called, brackets in calls:
        name = called.lower()
        if (name in _FUNCTIONS and (brackets or (name in _BARE and name not in column_names))) or (
            name == _CLOCK and brackets.endswith(")")
        ):
            yield _Impure(f"{name}()")
        elif name in _CHOOSING and brackets and not (has_order and name in _COLLECTING):
            yield _Impure(f"{name}()", is_certain=False)
