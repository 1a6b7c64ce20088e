"""Purity: a transform must be a function of its rows, which its plan shows without asking Spark's server."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from tidegate.jobs.impure_sql import (
    CHOOSING,
    CLOCK,
    CLOCK_TEXT,
    COLLECTING,
    ENCRYPTION,
    FILE,
    FUNCTIONS,
    OF_TIMES,
    UNORDERED,
    Impure,
    clock_text,
    impure_in_sql,
)
from tidegate.jobs.spark.library_internals import plan_of
from tidegate.state_store.base.errors import DeclarationInvalid

logger = logging.getLogger(__name__)

_RELATIONS = {"limit": "limit()", "offset": "offset()", "tail": "tail()", "sample": "sample()", "sample_by": "sampleBy()"}
_NAMES_IN_PYTHON = {"distributed_sequence_id": "zipWithIndex"}  # what authors write
_UNION = 2  # pyspark.sql.connect.proto.SetOperation.SET_OP_TYPE_UNION
_TIMES = (T.DateType, T.TimestampType, T.TimestampNTZType)


def check_pure(rows: Sequence[DataFrame], returned: DataFrame, columns: Collection[str]) -> None:
    """Refuse a transform whose result differs each time it runs; warn if it may differ.

    `rows` are the DataFrames that the transform got, `columns` their columns.

    Raises: DeclarationInvalid.
    """
    operations = set(_impure_in_message(*plan_of(returned, rows), columns))
    if any(found.beside for found in operations):
        times = {field.name.lower() for frame in rows for field in frame.schema if isinstance(field.dataType, _TIMES)}
        operations = {found for found in operations if not found.beside or found.beside in times}
    _refuse_certain("The transform", operations)
    if operations:
        logger.warning(
            "The transform uses %s: that keeps some of several rows, or the order in which they come. Where no order tells "
            "these rows apart, what comes out is not the same each time.",
            ", ".join(sorted(found.name for found in operations)),
        )


def check_combiners(state: str, rows: DataFrame, partials: DataFrame, columns: Collection[str]) -> None:
    """Refuse an author's own aggregates of a state if one computes another partial of the same rows each time.

    Raises: DeclarationInvalid.
    """
    found = _impure_in_message(*plan_of(partials, [rows]), columns)
    _refuse_certain(f"A combiner of state {state}", {each for each in found if not each.beside})


def _refuse_certain(who: str, operations: Collection[Impure]) -> None:
    if refused := sorted(found.name for found in operations if found.is_certain):
        raise DeclarationInvalid(
            f"{who} uses {', '.join(refused)}: what that gives depends on when and for whom it runs, or how Spark shares rows "
            "among tasks, so a batch that is tried again would be another batch. Take it out; or have the source's rows carry "
            "what is needed, such as a time of their own."
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


def _impure_in_message(message: Any, sources: Collection[int], columns: Collection[str]) -> Iterator[Impure]:
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
            if called not in UNORDERED or found.name.removesuffix("()") not in COLLECTING:
                yield found


def _impure_in_relation(relation: Any, columns: Collection[str]) -> Iterator[Impure]:
    kind = relation.WhichOneof("rel_type")
    if kind == "limit" and relation.limit.input.HasField("sort"):
        yield Impure("limit() of sorted rows", is_certain=False)
    elif kind == "deduplicate" and not relation.deduplicate.all_columns_as_keys:
        yield Impure("dropDuplicates() over some columns", is_certain=False)
    elif kind == "sql":
        yield from impure_in_sql(relation.sql.query, columns)
    elif kind in _RELATIONS:
        yield Impure(_RELATIONS[kind])


def _called(expression: Any) -> str:
    """Return the name of the function that an expression calls; "" for another expression."""
    kind = expression.WhichOneof("expr_type")
    if kind not in ("unresolved_function", "call_function"):
        return ""
    name: str = getattr(expression, kind).function_name
    return name.lower().rpartition(".")[2].strip("`")  # call_function() takes it as SQL writes it


def _impure_in_expression(expression: Any, name: str, columns: Collection[str]) -> Iterator[Impure]:
    kind = expression.WhichOneof("expr_type")
    if kind == "expression_string":
        yield from impure_in_sql(expression.expression_string.expression, columns)
    elif kind == "unresolved_attribute" and _column(expression, 0) == FILE and FILE not in columns:
        yield Impure(FILE)
    elif kind == "cast" and OF_TIMES.search(expression.cast.type_str or expression.cast.type.WhichOneof("kind") or ""):
        yield from map(clock_text, _clock_texts([expression.cast.expr]))
    elif name:
        yield from _impure_in_call(name, getattr(expression, kind).arguments)


def _impure_in_call(name: str, arguments: Sequence[Any]) -> Iterator[Impure]:
    if name in FUNCTIONS or (name == CLOCK and not arguments):
        yield Impure(f"{_NAMES_IN_PYTHON.get(name, name)}()")
    elif name in CHOOSING and not (name == "mode" and len(arguments) > 1 and arguments[1].literal.boolean):
        yield Impure(f"{name}()", is_certain=False)
    elif name == ENCRYPTION and not _draws_nothing(arguments):
        yield Impure(f"{name}() without a vector")
    yield from _clock_in_call(name, arguments)


def _clock_in_call(name: str, arguments: Sequence[Any]) -> Iterator[Impure]:
    for text in _clock_texts(arguments):
        if name in ("<", "<=", ">", ">=") or OF_TIMES.search(name):
            yield clock_text(text)
        elif name in ("==", "<=>", "in"):
            yield from (clock_text(text, column) for column in map(_column, arguments) if column)


def _draws_nothing(arguments: Sequence[Any]) -> bool:
    """Return whether an encryption has a mode that needs no vector, or is given a vector: in Python, "" stands for none."""
    if any(mode.literal.string.upper() == "ECB" for mode in arguments[2:3]):
        return True
    return any(vector.literal.WhichOneof("literal_type") != "string" or vector.literal.string for vector in arguments[4:5])


def _clock_texts(expressions: Iterable[Any]) -> list[str]:
    return [each.literal.string for each in expressions if CLOCK_TEXT.fullmatch(each.literal.string)]


def _column(expression: Any, part: int = -1) -> str:
    """Return a part of the name of the column that an expression is, the last one by default; "" if it is none."""
    return str(expression.unresolved_attribute.unparsed_identifier.split(".")[part].strip("`"))


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
