"""Reads texts as typed values with Python's own readers, and draws valid, nearly valid and invalid texts."""

import random
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any
from zoneinfo import ZoneInfo

from tests.fuzz.harness import Column, Verdict, number_key

COUNTS, EITHER, REFUSED = Verdict.COUNTS, Verdict.EITHER, Verdict.REFUSED
Meaning = tuple[Verdict, Any]
NOTHING: Meaning = (REFUSED, None)
BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
ZONES = ["UTC", "UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata"]

LETTERS = (
    "abcXYZ019 _-.:;,|'\"\\/%{}[]()<>&#+*~`^$@!?=\t\x01\x7f"
    "\u00a0\u00e9\u00fc\u00df\u0416\u4e2d\u2028\u200b\ufffd\ufeff\U0001f30a"
)


def column(draw: random.Random, name: str, types: "dict[str, Callable[[random.Random], str]]") -> Column:
    return Column(name, types[draw.choice(list(types))](draw))


def _decimal(draw: random.Random) -> str:
    precision = draw.choice([1, 2, 5, 9, 10, 18, 19, 38, draw.randint(1, 38)])
    return f"decimal({precision},{draw.choice([0, 2, precision, draw.randint(0, precision)]) if precision > 1 else 0})"


TYPES: dict[str, Callable[[random.Random], str]] = {
    "string": lambda _: "string",
    "integer": lambda draw: draw.choice(list(BITS)),
    "decimal": _decimal,
    "boolean": lambda _: "boolean",
    "float": lambda draw: draw.choice(["double", "float"]),
    "date": lambda _: "date",
    "timestamp": lambda _: "timestamp",
    "timestamp_ntz": lambda _: "timestamp_ntz",
    "binary": lambda _: "binary",
}


def text_of(draw: random.Random, letters: str = LETTERS) -> str:
    return "".join(draw.choice(letters) for _ in range(draw.choice([0, 1, 1, 2, 3, 5, 8, 30])))


def good_text(draw: random.Random, kind: str, letters: str = LETTERS) -> str:
    if kind in ("string", "binary"):
        return text_of(draw, letters)
    if kind in BITS:
        limit = 2 ** (BITS[kind] - 1)
        return str(draw.choice([0, 1, -1, limit - 1, -limit, draw.randint(-limit, limit - 1), draw.randint(-99, 99)]))
    if kind.startswith("decimal"):
        precision, scale = digits_of(kind)
        whole = "".join(draw.choice("0123456789") for _ in range(draw.randint(0, precision - scale)))
        part = "".join(draw.choice("0123456789") for _ in range(draw.randint(0, scale)))
        if draw.random() < 0.2:
            whole, part = "9" * (precision - scale), "9" * scale
        return draw.choice(["", "-"]) + (whole or "0") + (f".{part}" if part else "")
    if kind == "boolean":
        return draw.choice(["true", "false"])
    if kind in ("double", "float"):
        limit = 3e38 if kind == "float" else 1.7e308
        number = draw.choice([0.1, -0.0, 1e16, 5e-324, 1 / 3, draw.uniform(-1, 1), draw.uniform(-limit, limit), 16777217.0])
        return repr(number)
    day = date.fromordinal(draw.choice([1, 3652059, draw.randint(1, 3652059), draw.randint(719000, 745000)]))
    if kind == "date":
        return day.isoformat()
    time = f"{draw.randint(0, 23):02d}:{draw.randint(0, 59):02d}:{draw.randint(0, 59):02d}"
    if digits := draw.choice([0, 0, 3, 6, draw.randint(1, 6)]):
        time += "." + "".join(draw.choice("0123456789") for _ in range(digits))
    zone = draw.choice(["", "", "Z", "+00:00", "+02:00", "-05:30", "+14:00"]) if kind == "timestamp" else ""
    if zone[1:] and (day.year in (1, 9999)):
        zone = "Z"
    return f"{day.isoformat()}{draw.choice('T ')}{time}{zone}"


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


def odd_text(draw: random.Random, kind: str) -> str:
    group = "integer" if kind in BITS else kind.split("(", maxsplit=1)[0]
    group = {"double": "float", "timestamp": "time", "timestamp_ntz": "time"}.get(group, group)
    if draw.random() < 0.6:
        return draw.choice(ODD[group])
    text = list(good_text(draw, kind))
    place = draw.randint(0, len(text))
    slip = draw.choice("0 -+.:TZe9\u0663\u00a0_")
    draw.choice([lambda: text.insert(place, slip), lambda: text.__setitem__(slice(place, place + 1), slip)])()
    return "".join(text)


def digits_of(kind: str) -> tuple[int, int]:
    precision, scale = re.findall(r"\d+", kind)
    return int(precision), int(scale)


def meaning(kind: str, text: str, zone: str = "UTC") -> Meaning:
    if kind == "string":
        return (REFUSED if "\0" in text else COUNTS), text
    if kind == "binary":
        return COUNTS, text.encode()
    if kind == "boolean":
        lowered = text.lower() if text.isascii() else ""
        return (COUNTS if text == lowered else EITHER, lowered == "true") if lowered in ("true", "false") else NOTHING
    if not text.isascii() or text != text.strip() or "_" in text or "\n" in text:
        return NOTHING
    if kind in BITS:
        return _integer(kind, text)
    if kind.startswith("decimal"):
        return _decimal_of(kind, text)
    if kind in ("double", "float"):
        return _float(kind, text)
    if kind == "date":
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", text):
            return NOTHING
        try:
            return COUNTS, date.fromisoformat(text)
        except ValueError:
            return NOTHING
    return _timestamp(kind, text, zone)


def _integer(kind: str, text: str) -> Meaning:
    if not re.fullmatch(r"[+-]?[0-9]{1,4000}", text):
        return NOTHING
    number = int(text)
    if not -(2 ** (BITS[kind] - 1)) <= number < 2 ** (BITS[kind] - 1):
        return NOTHING
    return (COUNTS if text == str(number) else EITHER), number


def _decimal_of(kind: str, text: str) -> Meaning:
    precision, scale = digits_of(kind)
    try:
        number = Decimal(text)
    except InvalidOperation:
        return NOTHING
    if not number.is_finite():
        return NOTHING
    with localcontext(prec=10_000, Emax=10**6, Emin=-(10**6)) as context:
        context.clear_traps()
        fits = abs(number) < 10 ** (precision - scale) and number == number.quantize(Decimal(1).scaleb(-scale))
    if number and not fits:
        return NOTHING
    plain = re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text) and len(text) <= 40
    return (COUNTS if plain else EITHER), (number.normalize(context) if number else Decimal(0))


def _float(kind: str, text: str) -> Meaning:
    try:
        number = float(text)
    except ValueError:
        return NOTHING
    is_named = not any(letter.isdigit() for letter in text)
    if is_named:
        return EITHER, number_key(number, kind)
    try:
        key = number_key(number, kind)
    except OverflowError:
        return NOTHING
    if key in ("inf", "-inf"):
        return NOTHING
    return (COUNTS if re.fullmatch(r"-?[0-9]+\.[0-9]+(e[+-]?[0-9]+)?", text) else EITHER), key


_FULL = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)?")
_ANY = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d(:?\d\d)?)?)?")


def _timestamp(kind: str, text: str, zone: str) -> Meaning:
    if not (found := _ANY.fullmatch(text)):
        return NOTHING
    if kind == "timestamp_ntz" and found[4]:
        return NOTHING
    if re.search(r"[+-]\d\d:?[6-9]\d$", text):
        return NOTHING  # Python takes 60 minutes for an hour
    digits = (found[3] or "")[1:]
    if digits[6:].strip("0"):
        return NOTHING
    try:
        time = datetime.fromisoformat(text.replace(digits, digits[:6]) if digits[6:] else text)
    except ValueError:
        return NOTHING
    sure = COUNTS if _FULL.fullmatch(text) else EITHER
    if kind == "timestamp_ntz":
        return sure, time
    if time.tzinfo is None and zone != "UTC":
        both = {time.replace(tzinfo=ZoneInfo(zone), fold=fold).utcoffset() for fold in (0, 1)}
        if len(both) > 1:
            return NOTHING
        time = time.replace(tzinfo=ZoneInfo(zone))
    try:
        time = time if time.tzinfo else time.replace(tzinfo=UTC)
        if abs(time.utcoffset() or timedelta(0)) > timedelta(hours=14):
            sure = EITHER
        return sure, time.astimezone(UTC)
    except OverflowError:
        return NOTHING
