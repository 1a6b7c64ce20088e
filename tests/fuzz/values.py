"""Texts of typed values: valid ones, nearly valid ones and odd ones are drawn, and read with Python's own readers."""

import re
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, localcontext
from typing import Any
from zoneinfo import ZoneInfo

from hypothesis import strategies as st

from tests.fuzz.harness import Verdict, comparable

COUNTS, EITHER, REFUSED = Verdict
Meaning = tuple[Verdict, Any]
NOTHING: Meaning = (REFUSED, None)
BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
ZONES = st.sampled_from(["UTC", "UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata"])
LETTERS = "abcXYZ019 _-.:;,|'\"\\/%{}[]()<>&#+*~`^$@!?=\t\x01\x7f\u00a0éüß\u0416中\u2028\u200b\ufffd\ufeff🌊"
WIDE = Context(prec=40)
TEXT, TEXT_OF_LINES = st.text(LETTERS, max_size=30), st.text(LETTERS + "\n\r", max_size=30)
DECIMALS = st.integers(1, 38).flatmap(lambda digits: st.integers(0, digits).map(lambda scale: f"decimal({digits},{scale})"))
TYPES = st.one_of(
    st.just("string"), st.sampled_from(list(BITS)), DECIMALS,
    st.sampled_from(["boolean", "double", "float", "date", "timestamp", "timestamp_ntz", "binary"]),
)  # fmt: skip
ZONE_TEXTS = st.sampled_from(["", "", "Z", "+00:00", "+02:00", "-05:30", "+14:00"])
LENGTHS = st.sampled_from([19, 19, 21, 22, 23, 25, 26])  # of times with more or fewer digits of a second


def good(kind: str, text: st.SearchStrategy[str] = TEXT) -> st.SearchStrategy[str]:
    if kind in BITS:
        limit = 2 ** (BITS[kind] - 1)
        return st.integers(-limit, limit - 1).map(str)
    if kind.startswith("decimal"):
        digits, scale = digits_of(kind)
        return st.integers(1 - 10**digits, 10**digits - 1).map(lambda number: f"{Decimal(number).scaleb(-scale, WIDE):f}")
    if kind in ("double", "float"):
        return st.floats(width=32 if kind == "float" else 64, allow_nan=False, allow_infinity=False).map(repr)
    if kind.startswith("timestamp"):
        parts = st.tuples(st.datetimes(), st.sampled_from("T "), LENGTHS)
        times = parts.map(lambda each: each[0].isoformat(each[1], "microseconds")[: each[2]])
        return st.tuples(times, ZONE_TEXTS).map("".join) if kind == "timestamp" else times
    others = {"boolean": st.sampled_from(["true", "false"]), "date": st.dates().map(date.isoformat)}
    return others.get(kind, text)


ODD: dict[str, list[str]] = {
    "integer": [
        *("1.0", "1e3", " 1", "1 ", "+7", "--1", "0x10", "1_000", "\u0663", "\uff11", "1,5", "007", "-0", "9" * 19, "1" * 40),
        *("NaN", "1L", "true", "."),
    ],
    "decimal": [
        *("1e3", "1E-2", ".5", "5.", "+1.5", "1.005", "NaN", "Infinity", "-Inf", "1_0", "\u0661.5", "1,5", "$1", "1e400"),
        *("1e-400", "0e99999", "1.50000000000000000000000000000000000000000", "0" * 50 + "1", "1" * 39, ".", "-", "e5", "1e"),
        *("0x1p3", " 1.5", "-0.00", "1d"),
    ],
    "boolean": ["True", "FALSE", "t", "1", "0", "yes", " true", "tru\u0435"],
    "float": [
        *("NaN", "nan", "Infinity", "-Infinity", "Inf", "inf", "1e999", "1e39", "0x1p3", "1.5f", "1d", ".5", "5.", "1e5"),
        *("1_0", "\u0661", " 1", "1e-999", "infinity", "+1", "1e", "e1", "-"),
    ],
    "date": [
        *("10:00", "2024", "2024-01", "2024-1-5", "2024-02-30", "2024-01-05 ", "2024-01-05 garbage", "2024-01-05T99:99"),
        *("20240105", "2024-W01-1", "0000-01-01", "10000-01-01", "+2024-01-05", "-2024-01-05", "05.01.2024", "2024/01/05"),
        *("2023-02-29", "1900-02-29", "2000-02-29", "2024-13-01", "epoch", "today", "now", "1704412800", "\u0662024-01-05"),
        "2024-01-05T00:00:00",
    ],
    "time": [
        *("10:00", "T10:00", "10:00:00", "2024-01-05", "2024-01-05T10", "2024-01-05T10:00", "2024-01-05 24:00:00"),
        *("2024-01-05T23:59:60", "2024-01-05T10:00:00.1234567", "2024-01-05T10:00:00.123456000", "2024-01-05T10:00:00."),
        *("2024-01-05T10:00:00,5", "2024-01-05T10:00:00 Z", "2024-01-05T10:00:00z", "2024-01-05t10:00:00"),
        *("2024-01-05T10:00:00+0530", "2024-01-05T10:00:00+05", "2024-01-05T10:00:00 Europe/Berlin"),
        *("2024-01-05T10:00:00[UTC]", "2024-01-05T10:00:00GMT", "2024-01-05T10:00:00+24:00", "2024-01-05T10:00:00+05:60"),
        *("2024-01-05  10:00:00", "0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00", "10000-01-01T00:00:00"),
        *("0000-01-01T00:00:00", "2024-02-30T00:00:00", "1704412800", "now", "2024-01-05T10:00:00-00:00"),
        *("2024-03-31T02:30:00", "2024-10-27T02:30:00", "2024-01-05T1:00:00", "2024-01-05T10:00:00+18:00"),
        *("2024-01-05T10:00:00-18:59", "2024-01-05T10:00Z", "2024-01-05Z"),
    ],
    "string": ["NULL", "null", "NA", "\\N", "", " ", "  a ", "'", "#x", "\x7f"],
    "binary": ["=", "YQ=", "YQ", "a b", "!!!!"],
}


@st.composite
def odd(draw: Any, kind: str) -> str:
    group = "integer" if kind in BITS else {"double": "float"}.get(kind, kind.partition("(")[0].partition("stamp")[0])
    if draw(st.booleans()):
        return str(draw(st.sampled_from(ODD[group])))
    text, slip = draw(good(kind)), draw(st.sampled_from("0 -+.:TZe9\u0663\u00a0_"))
    place = draw(st.integers(0, len(text)))
    return text[:place] + slip + text[place + draw(st.integers(0, 1)) :]


@st.composite
def row(draw: Any, kinds: list[str], is_odd: bool, good: Any, odd: Any) -> list[str | None]:
    """Draw a text or NULL for each column, of which one at most is odd; good and odd ones are drawn as the format does."""
    place = draw(st.integers(0, 3 * len(kinds))) if is_odd else -1
    of = [odd(kind) if number == place else st.none() | good(kind) for number, kind in enumerate(kinds)]
    return [draw(text) for text in of]


def digits_of(kind: str) -> tuple[int, int]:
    digits, scale = re.findall(r"\d+", kind)
    return int(digits), int(scale)


def meaning(kind: str, text: str, zone: str = "UTC") -> Meaning:
    """Return the value of a text in a column of this type, and how sure it is."""
    try:
        if kind in ("string", "binary"):
            return COUNTS, text if kind == "string" else text.encode()
        if not text.isascii() or text != text.strip() or "_" in text or "\n" in text:
            return NOTHING
        readers = {"boolean": _truth, "double": _float, "float": _float, "date": _date}
        if kind.startswith("timestamp"):
            return _time(kind, text, zone)
        return readers.get(kind, _number)(kind, text)
    except (ValueError, ArithmeticError):  # Python's readers refuse it
        return NOTHING


def _truth(_: str, text: str) -> Meaning:
    value = {"true": True, "false": False}.get(text.lower())
    return NOTHING if value is None else (COUNTS if text.islower() else EITHER, value)


def _date(_: str, text: str) -> Meaning:
    return (COUNTS, date.fromisoformat(text)) if re.fullmatch(r"\d{4}-\d\d-\d\d", text) else NOTHING


def _number(kind: str, text: str) -> Meaning:
    if kind in BITS:
        number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,4000}", text) else None
        fits = number is not None and -(2 ** (BITS[kind] - 1)) <= number < 2 ** (BITS[kind] - 1)
        return (COUNTS if text == str(number) else EITHER, number) if fits else NOTHING
    digits, scale = digits_of(kind)
    decimal = Decimal(text)
    with localcontext(prec=10_000, Emax=10**6, Emin=-(10**6)) as context:
        context.clear_traps()
        fits = abs(decimal) < 10 ** (digits - scale) and decimal == decimal.quantize(Decimal(1).scaleb(-scale))
        is_plain = re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text) and len(text) <= 40
        return (COUNTS if is_plain else EITHER, decimal.normalize()) if fits or decimal == 0 else NOTHING


def _float(kind: str, text: str) -> Meaning:
    number = comparable(float(text), kind)
    if not any(letter.isdigit() for letter in text):
        return EITHER, number  # its name, such as NaN
    if number in ("inf", "-inf"):
        return NOTHING
    return (COUNTS if re.fullmatch(r"-?[0-9]+\.[0-9]+(e[+-]?[0-9]+)?", text) else EITHER), number


_FULL = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)?")
_ANY = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6}0*)?)?(Z|[+-]\d\d(:?[0-5]\d)?)?)?")


def _time(kind: str, text: str, zone: str) -> Meaning:
    found = _ANY.fullmatch(text)
    if not found or (kind == "timestamp_ntz" and found[4]):
        return NOTHING
    time = datetime.fromisoformat(text.replace(found[3], found[3][:7]) if found[3] else text)
    sure = COUNTS if _FULL.fullmatch(text) else EITHER
    if kind == "timestamp_ntz":
        return sure, time
    if time.tzinfo is None:
        twice = {time.replace(tzinfo=ZoneInfo(zone), fold=fold).utcoffset() for fold in (0, 1)}
        if len(twice) > 1:
            return NOTHING
        time = time.replace(tzinfo=ZoneInfo(zone))
    elif abs(time.utcoffset() or timedelta(0)) > timedelta(hours=14):
        sure = EITHER
    return sure, time.astimezone(UTC)
