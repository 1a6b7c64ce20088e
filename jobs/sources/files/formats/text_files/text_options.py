"""Options of text formats, such as encoding, separator and time zone, named as Spark's: what they may be and mean."""

import re
from collections.abc import Mapping
from zoneinfo import ZoneInfo

from tidegate.jobs.sources.files.content import UTF8, codec_of

# The option with an author's pattern, such as dd.MM.yyyy, for each family of types.
PATTERNS = {"date": "dateformat", "timestamp": "timestampformat", "timestamp_ntz": "timestampntzformat"}
_OF_LINES = ("encoding", "charset", "linesep")
_OF_VALUES = (*_OF_LINES, *PATTERNS.values(), "locale", "timezone")
# By format, in lower case.
KNOWN = {
    "csv": (*_OF_VALUES, "sep", "delimiter", "quote", "escape", "comment", "nullvalue"),
    "json": _OF_VALUES,
    "text": (*_OF_LINES, "wholetext"),
    "parquet": ("timezone",),  # of partitions
}
# The letters of patterns with which Spark reads; it knows others that it only writes, and the year of weeks it refuses.
_READ_BY_SPARK = frozenset("GyMLdDahKkHmsSVzOXxZ")
_NAMED_ZONES = frozenset("Vz")
_OF_THE_TIME = frozenset("ahKkHmsS")
_OPTIONAL, _LITERAL = re.compile(r"\[[^\[\]]*\]"), re.compile(r"'[^']*'")


def encoding_of(options: Mapping[str, str]) -> str:
    """Return Python's name of the declared encoding; UTF-8 by default."""
    by_name = named(options)
    return codec_of(by_name.get("encoding", by_name.get("charset", UTF8)))


def named(options: Mapping[str, str]) -> dict[str, str]:
    """Return options by their names in lower case, as Spark compares them."""
    return {name.lower(): str(value) for name, value in options.items()}


def zone_of(options: Mapping[str, str]) -> str:
    """Return the time zone for timestamps without one."""
    zone = named(options).get("timezone", "UTC")
    return "UTC" if zone in ("Z", "GMT") else zone


def line_end_of(options: Mapping[str, str]) -> bytes | None:
    """Return the declared line end; None for all usual ones."""
    line_end = named(options).get("linesep")
    return None if line_end is None else line_end.encode()


def is_true(options: Mapping[str, str], name: str) -> bool:
    """Return whether an option is switched on."""
    return named(options).get(name, "").lower() == "true"


def check_options(format: str, options: Mapping[str, str]) -> None:
    """Refuse unknown options, by which Spark might drop, guess or repair rows, and values that make no sense.

    Raises: ValueError.
    """
    known, by_name = KNOWN[format], named(options)
    if unknown := [name for name in options if name.lower() not in known]:
        raise ValueError(f"cannot take the option {unknown[0]} for {format}: use one of {', '.join(known)}.")
    try:
        encoding_of(options)
    except LookupError as error:
        raise ValueError(f"cannot take the option encoding: {error} is not known. Use a name such as latin-1.") from None
    for name in ("quote", "escape", "comment"):
        if len(by_name.get(name, "")) > 1:
            raise ValueError(f"cannot take the option {name}={by_name[name]!r}: use one character, or none.")
    for name in ("escape", "linesep"):
        if by_name.get(name) == "":
            raise ValueError(f"cannot take the option {name}='': leave it out, or write a character.")
    for name in PATTERNS.values():
        if name in by_name and (reason := _wrong_with(by_name[name])):
            raise ValueError(f"cannot take the option {name}={by_name[name]!r}: {reason}.")
    try:
        ZoneInfo(zone_of(options))
    except (ValueError, OSError, LookupError):
        raise ValueError(
            f"cannot take the option timeZone={by_name['timezone']!r}: use a name such as Europe/Berlin."
        ) from None


def _wrong_with(pattern: str) -> str | None:
    always, all_letters = letters_of(pattern)
    if unknown := sorted(all_letters - _READ_BY_SPARK):
        return f"Spark reads no dates or times with the letter {unknown[0]}; the year is y, the day of the month d"
    if all_letters & _NAMED_ZONES:
        return "Spark would choose or make up a moment where the clocks of a named zone change. Use an offset, such as XXX"
    if "S" * 7 in pattern:
        return "Spark would cut off what follows microseconds"
    if "y" not in always or not ("D" in always or ("d" in always and always & {"M", "L"})):
        return "Spark would make up a part of the date. Use year, month and day, such as yyyy-MM-dd; or read a string"
    for letters in (always, all_letters):
        if letters & _OF_THE_TIME and not letters & {"H", "k"} and not (letters & {"h", "K"} and "a" in letters):
            return "Spark would make up the hour. Use HH, from 00 to 23, or hh with a for AM or PM"
    return None


def letters_of(pattern: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the letters of a pattern that stand for values: those outside optional sections, and all."""
    pattern = always = _LITERAL.sub("", pattern)
    while always != (outer := _OPTIONAL.sub("", always)):
        always = outer
    always = always.partition("[")[0]  # the end closes a section, too
    return frozenset(filter(str.isalpha, always)), frozenset(filter(str.isalpha, pattern))
