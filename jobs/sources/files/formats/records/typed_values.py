"""Converts text to columns of the declared types, and refuses text without a full and exact meaning.

Nothing is rounded, cut off, trimmed or guessed. A date is ``2024-01-05``; a timestamp is a date, optionally with a time of at
most six digits after the second, and a zone; a number is written with ASCII digits.
"""

import base64
import binascii
from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.jobs.sources.column_types import SparkType, in_another_case
from tidegate.state_store.declarations.column_spec import TICKS

# From this year on Arrow no longer applies changes of clocks; here the zones' present rules are assumed to hold for ever.
FIRST_YEAR_BY_RULE = 2037
_EPOCH, _TICK = datetime(1970, 1, 1), timedelta(microseconds=1)
MOST_DIGITS = 38  # of Spark's decimals, and of texts that Arrow converts to one correctly
_DATE = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d{2}|[1-9]\d{3})-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d{1,6}0*)?)?"
_ZONE = r"(?:Z|[+-](?:0\d|1[0-8])(?::?[0-5]\d)?)"
_FORMS: dict[str, str] = {
    "integer": r"^[+-]?\d+$",
    "decimal": r"^[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?$",
    "float": r"^(?:[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|NaN|[+-]?Inf(?:inity)?)$",
    "date": rf"^{_DATE}$",
    "timestamp": rf"^{_DATE}(?:[T ]{_TIME}{_ZONE}?)?$",
    "timestamp_ntz": rf"^{_DATE}(?:[T ]{_TIME})?$",
}
# JSON values of these families are converted from their text: strings by their content, numbers as they are written.
_WRITTEN_AS_TEXT = frozenset({"decimal", "float", "date", "timestamp", "timestamp_ntz"})
_ONE_BY_ONE = frozenset({"binary", "array", "map", "struct"})


def from_texts(kind: SparkType, texts: pa.Array, zone: str = "UTC") -> tuple[pa.Array, dict[int, str]]:
    """Return a column of this type, and the errors by index; texts with an error are NULL in it.

    A timestamp that names no zone is in `zone`.
    """
    if kind.family == "text":
        return texts, {}
    try:
        return _cast(kind, texts, zone), {}
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass
    if len(texts) == 1:
        return pa.nulls(1, kind.arrow), {0: kind.refusal(texts[0].as_py())}
    half = len(texts) // 2
    left, bad = from_texts(kind, texts[:half], zone)
    right, more = from_texts(kind, texts[half:], zone)
    return pa.concat_arrays([left, right]), bad | {half + number: reason for number, reason in more.items()}


def _cast(kind: SparkType, texts: pa.Array, zone: str) -> pa.Array:
    """Cast texts, all of them or none.

    Raises: pyarrow.ArrowInvalid.
    """
    if kind.family == "boolean":
        lowered = pc.utf8_lower(texts)
        is_true = pc.equal(lowered, "true")
        _require(pc.or_(is_true, pc.equal(lowered, "false")))
        return is_true
    if kind.family == "binary":
        return pc.cast(texts, pa.binary())
    _require(pc.match_substring_regex(texts, _FORMS[kind.family]))
    if kind.family == "decimal":
        texts = _short_decimals(texts)
    if kind.family == "integer":
        texts = pc.replace_substring_regex(texts, r"^\+", "")
    if kind.family == "float":
        numbers = pc.cast(texts, kind.arrow)
        is_named = pc.match_substring_regex(texts, r"^[+-]?[NI]")
        _require(pc.or_(is_named, pc.is_finite(numbers)))  # 1e999 is out of range
        return numbers
    if kind.family == "timestamp":
        return _timestamps(texts, zone)
    if kind.family == "timestamp_ntz":
        texts = pc.replace_substring_regex(texts, r"(\.\d{6})0+$", r"\1")
    return pc.cast(texts, kind.arrow)


def _short_decimals(texts: pa.Array) -> pa.Array:
    """Return decimals without exponents, of 38 digits at most: Arrow's cast may misread longer ones.

    Raises: pyarrow.ArrowInvalid.
    """
    is_hard = pc.match_substring_regex(texts, r"[eE]|(?:\d\.?){39}")
    if not pc.any(is_hard).as_py():
        return texts
    return pa.array(
        [_without_exponent(t.as_py()) if hard.as_py() else t.as_py() for t, hard in zip(texts, is_hard, strict=True)],
        pa.string(),
    )


def _without_exponent(text: str) -> str:
    sign, digits, exponent = Decimal(text).as_tuple()
    assert isinstance(exponent, int)
    significant = "".join(map(str, digits)).strip("0")
    exponent += len(digits) - len("".join(map(str, digits)).rstrip("0"))
    if not significant:
        return "0"
    if len(significant) > MOST_DIGITS or exponent < -MOST_DIGITS or len(significant) + exponent > MOST_DIGITS:
        raise pa.ArrowInvalid("more digits than any decimal has")
    return f"{Decimal((sign, tuple(map(int, significant)), exponent)):f}"


def _timestamps(texts: pa.Array, zone: str) -> pa.Array:
    texts = pc.replace_substring_regex(texts, r"(\.\d{6})0+", r"\1")
    has_zone = pc.match_substring_regex(texts, r".{10}.*(?:Z|[+-]\d{2}(?::?\d{2})?)$")
    nothing = pa.scalar(None, pa.string())
    local = pc.cast(pc.if_else(has_zone, nothing, texts), pa.timestamp("us"))
    absolute = pc.cast(pc.if_else(has_zone, texts, nothing), pa.timestamp("us", "UTC"))
    if zone != "UTC":  # UTC has no rules, and needs no time zone database
        local = _to_instants(local, zone)
    instants = pc.coalesce(absolute, local.cast(pa.timestamp("us", "UTC")))
    ticks = instants.cast(pa.int64())  # a zone may have led out of the years that Postgres and Python share
    _require(pc.and_(pc.greater_equal(ticks, TICKS[0]), pc.less_equal(ticks, TICKS[1])))
    return instants


def _to_instants(times: pa.Array, zone: str) -> pa.Array:
    """Return local times in a zone as instants.

    Raises: pyarrow.ArrowInvalid for times that a change of clocks leaves out or repeats.
    """
    is_late = pc.fill_null(pc.greater_equal(pc.year(times), FIRST_YEAR_BY_RULE), pa.scalar(False))
    if not pc.any(is_late).as_py():
        return pc.assume_timezone(times, zone, ambiguous="raise", nonexistent="raise")
    early = _to_instants(pc.if_else(is_late, pa.scalar(None, times.type), times), zone)
    rule = ZoneInfo(zone)
    moments = []
    for time in pc.if_else(is_late, times, pa.scalar(None, times.type)).to_pylist():
        moments.append(None if time is None else (time - _EPOCH - _offset(time, rule)) // _TICK)
    ruled = pa.array(moments, pa.int64()).cast(pa.timestamp("us")).cast(early.type)
    return pc.coalesce(early, ruled)


def _offset(time: datetime, zone: ZoneInfo) -> timedelta:
    first, second = (time.replace(tzinfo=zone, fold=fold).utcoffset() for fold in (0, 1))
    if first is None or first != second:
        raise pa.ArrowInvalid("the clock shows this time twice, or never")
    return first


def _require(conditions: pa.Array) -> None:
    if pc.all(conditions, skip_nulls=True).as_py() is False:
        raise pa.ArrowInvalid("not of this form")


class Number(str):
    """A JSON number as written, digit for digit."""

    __slots__ = ()


class Whole(Number):
    """A number without point and exponent inside a nested value, where it is written otherwise than its int: -0."""

    __slots__ = ()


class Constant(str):
    """A number that Python writes into JSON but JSON lacks: NaN, Infinity, -Infinity."""

    __slots__ = ()


def from_json(kind: SparkType, values: Sequence[Any], zone: str = "UTC") -> tuple[pa.Array, dict[int, str]]:
    """Return a column of JSON values, and the errors by index; values with an error are NULL in it.

    A number with a point or an exponent must be a `Number`, and nested values for a text column must be texts: `JsonParser`
    sees to both.
    """
    takes, bad = _TAKES[kind.family], dict[int, str]()
    if not takes.issuperset(map(type, values)):
        bad = {number: kind.refusal(_shown(value)) for number, value in enumerate(values) if type(value) not in takes}
        values = [None if number in bad else value for number, value in enumerate(values)]
    if kind.family in _WRITTEN_AS_TEXT:
        column, more = _from_scalars(kind, values, zone)
    elif kind.family in _ONE_BY_ONE:
        column, more = _from_each(kind, values, zone)
    else:  # Arrow takes the Python values as they are
        try:
            column, more = pa.array(values, kind.arrow), {}
        except (OverflowError, pa.ArrowInvalid, UnicodeEncodeError):
            column, more = _from_each(kind, values, zone)
    return column, bad | more


def _from_scalars(kind: SparkType, values: Sequence[Any], zone: str) -> tuple[pa.Array, dict[int, str]]:
    texts = [value if value is None or type(value) is str else str(value) for value in values]
    try:
        return from_texts(kind, pa.array(texts, pa.string()), zone)
    except UnicodeEncodeError:
        lone = {n: kind.refusal(t) for n, t in enumerate(texts) if t is not None and not t.isascii()}
        good = pa.array([None if n in lone else t for n, t in enumerate(texts)], pa.string())
        column, bad = from_texts(kind, good, zone)
        return column, bad | lone


def _from_each(kind: SparkType, values: Sequence[Any], zone: str) -> tuple[pa.Array, dict[int, str]]:
    bad: dict[int, str] = {}
    converted = []
    for number, value in enumerate(values):
        try:
            converted.append(None if value is None else _converted(kind, value, zone))
        except ValueError as error:
            converted.append(None)
            bad[number] = str(error)
    return pa.array(converted, kind.arrow), bad


def _converted(kind: SparkType, value: Any, zone: str) -> Any:
    """Return a value as Arrow takes it.

    Raises: ValueError that says why it is none of this type.
    """
    parts = [part for _, part in kind.parts]
    try:
        match kind.family:
            case "binary":
                return base64.b64decode(value, validate=True)
            case "array":
                return [_inside(parts[0], item, zone) for item in value]
            case "map":
                return [(_inside(parts[0], key, zone), _inside(parts[1], item, zone)) for key, item in value.items()]
            case "struct":
                lacking = [name for name, _ in kind.parts if name not in value]
                if lacking and (case := in_another_case(lacking, value)):
                    raise ValueError(f"it has no field {lacking[0]}{case}")
                return {name: _inside(part, value.get(name), zone) for name, part in kind.parts}
        pa.array([value], kind.arrow)
    except binascii.Error:
        raise ValueError(f"{kind.refusal(value)} in Base64") from None
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair stands alone: that is no character") from None
    except (OverflowError, pa.ArrowInvalid):
        raise ValueError(kind.refusal(value)) from None
    return value


def _inside(kind: SparkType, value: Any, zone: str) -> Any:
    if value is None:
        return None
    if type(value) is Whole and kind.family != "text":
        value = int(value)
    if kind.family == "text" and type(value) in (bool, int, Number, Whole):
        value = {True: "true", False: "false"}.get(value, str(value)) if type(value) is bool else str(value)
    column, bad = from_json(kind, [value], zone)
    if bad:
        raise ValueError(bad[0])
    return column[0].as_py()


def _shown(value: Any) -> Any:
    return float(value) if type(value) is Number and len(value) < 18 and repr(float(value)) == value else value


_NONE = type(None)
# The Python types that each family accepts from JSON; a time is a text, never a number of seconds since some day.
_TAKES: dict[str, frozenset[type]] = {
    "text": frozenset({_NONE, str, Number}),
    "integer": frozenset({_NONE, int}),
    "decimal": frozenset({_NONE, int, Number, str}),
    "boolean": frozenset({_NONE, bool}),
    "float": frozenset({_NONE, int, Number, Constant}),
    "date": frozenset({_NONE, str}),
    "timestamp": frozenset({_NONE, str}),
    "timestamp_ntz": frozenset({_NONE, str}),
    "binary": frozenset({_NONE, str}),
    "array": frozenset({_NONE, list}),
    "map": frozenset({_NONE, dict}),
    "struct": frozenset({_NONE, dict}),
}
