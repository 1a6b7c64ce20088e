"""Patterns by which an author declares how dates and times are written, such as ``dd.MM.yyyy HH:mm``.

Spark converts these texts. A pattern is refused if Spark would have to make up a part of the date or the hour.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column

# The option with the pattern, for each family of types.
FORMATS = {"date": "dateformat", "timestamp": "timestampformat", "timestamp_ntz": "timestampntzformat"}
# The letters with which Spark reads; it knows others that it only writes, and the year of weeks it refuses.
_READ_BY_SPARK = frozenset("GyMLdDahKkHmsSVzOXxZ")
_ZONES, _OF_THE_TIME = frozenset("VzOXxZ"), frozenset("ahKkHmsS")
# What separates the values of a record for Spark, which gets records of one value: no text with it is of any pattern.
_NO_TEXT = "\x01"
_ELSEWHERE = "+01:00"  # any zone but UTC tells whether a text names its own
_YEARS = (1, 9999)  # that Postgres, Spark and Python share
_OPTIONAL, _LITERAL = re.compile(r"\[[^\[\]]*\]"), re.compile(r"'[^']*'")


def check_patterns(options: Mapping[str, str]) -> None:
    """Refuse patterns that Spark cannot read by, or that do not determine a date and a time.

    Raises: ValueError.
    """
    for name in FORMATS.values():
        if name in options and (why := _wrong_with(options[name])):
            raise ValueError(f"cannot take the option {name}={options[name]!r}: {why}.")


@dataclass(frozen=True)
class TimePattern:
    """The pattern of a column, and how Spark reads by it.

    `kind` is Spark's name of the column's type, `options` are the source's by lower-case names, `zone` is that of timestamps
    without one.
    """

    kind: str
    family: str
    options: Mapping[str, str]
    zone: str

    @property
    def form(self) -> str:
        """Return what a text should have been, for messages."""
        return f"{self.kind} of the form {self._text}"

    @property
    def one_moment(self) -> str:
        """Return what a local time should have been, for messages."""
        return f"one moment of the years 1 to 9999 in {self.zone}: a change of the clocks there may repeat it, or leave it out"

    @property
    def needs_moments(self) -> bool:
        """Whether what `read` returns is still to be found in the zone, by `moment`."""
        always, _ = _letters(self._text)
        return self.family == "timestamp" and self.zone != "UTC" and not always & _ZONES

    def read(self, text: "Column") -> "Column":
        """Return texts as values; a time without a zone is read as one of UTC."""
        return self._by_spark(text, "UTC")

    def fits(self, text: "Column", value: "Column") -> "Column":
        """Return whether a text, and the value that `read` made of it, have the form and a year that all programs share."""
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        # `value` is there once, because Spark may convert the text each time that it is.
        is_of_years = F.floor((F.year(value) - _YEARS[0]) / _YEARS[1]) == 0
        return ~F.contains(text, F.lit(_NO_TEXT)) & F.coalesce(is_of_years, F.lit(False))

    def moment(self, text: "Column", value: "Column") -> "Column":
        """Return what `value` returned as moments in the zone.

        NULL is a time that the zone's clocks do not show, or show twice, as `typed_values.from_texts` decides. A zone in the
        text leaves no choice.
        """
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        from jobs.sources.files.formats.text_tasks import LocalTimes  # noqa: PLC0415 - declaring must not load pyarrow

        # PySpark's stubs lack it. What Spark takes for deterministic it runs once more, to filter the rows.
        moments = F.arrow_udf(LocalTimes(self.zone).moments, "timestamp").asNondeterministic()  # type: ignore[attr-defined]
        in_zone: Column = moments(value.cast("string"))
        _, all_letters = _letters(self._text)
        if not all_letters & _ZONES:
            return in_zone
        has_zone = value == self._by_spark(text, _ELSEWHERE)
        return F.when(has_zone, value).otherwise(in_zone)

    @property
    def _text(self) -> str:
        return self.options[FORMATS[self.family]]

    def _by_spark(self, text: "Column", zone: str) -> "Column":
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        options = {name: self.options[name] for name in (FORMATS[self.family], "locale") if name in self.options}
        options |= {"timeZone": zone, "sep": _NO_TEXT, "quote": "", "nullValue": _NO_TEXT, "mode": "PERMISSIVE"}
        return F.from_csv(text, f"v {self.kind}", options).getField("v")


def _wrong_with(pattern: str) -> str | None:
    always, all_letters = _letters(pattern)
    if unknown := sorted(all_letters - _READ_BY_SPARK):
        return f"Spark reads no dates or times with the letter {unknown[0]}; the year is y, the day of the month d"
    if "S" * 7 in pattern:
        return "Spark would cut off what follows microseconds"
    if "y" not in always or not ("D" in always or ("d" in always and always & {"M", "L"})):
        return "Spark would make up a part of the date. Use year, month and day, such as yyyy-MM-dd; or read a string"
    for letters in (always, all_letters):
        if letters & _OF_THE_TIME and not letters & {"H", "k"} and not (letters & {"h", "K"} and "a" in letters):
            return "Spark would make up the hour. Use HH, from 00 to 23, or hh with a for AM or PM"
    return None


def _letters(pattern: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the letters of a pattern that stand for values: those outside optional sections, and all."""
    pattern = always = _LITERAL.sub("", pattern)
    while always != (outer := _OPTIONAL.sub("", always)):
        always = outer
    always = always.partition("[")[0]  # the end closes a section, too
    return frozenset(filter(str.isalpha, always)), frozenset(filter(str.isalpha, pattern))
