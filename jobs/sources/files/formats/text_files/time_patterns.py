"""Reads dates and times by an author's pattern, such as ``dd.MM.yyyy HH:mm``: Spark converts these texts."""

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F

from tidegate.jobs.sources.files.formats.text_files.text_options import PATTERNS, letters_of
from tidegate.jobs.sources.files.formats.text_files.text_tasks import LocalTimes

_ZONES = frozenset("OXxZ")
# What separates the values of a record for Spark, which gets records of one value: no text with it is of any pattern.
_NO_TEXT = "\x01"
_ELSEWHERE = "+01:00"  # any zone but UTC tells whether a text names its own
_YEARS = (1, 9999)  # that Postgres, Spark and Python share


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
        always, _ = letters_of(self._text)
        return self.family == "timestamp" and self.zone != "UTC" and not always & _ZONES

    def read(self, text: Column) -> Column:
        """Return texts as values; a time without a zone is read as one of UTC."""
        return self._by_spark(text, "UTC")

    def fits(self, text: Column, value: Column) -> Column:
        """Return whether a text, and the value that `read` made of it, have the form and a year that all programs share."""
        # `value` is there once, because Spark may convert the text each time that it is.
        is_of_years = F.floor((F.year(value) - _YEARS[0]) / _YEARS[1]) == 0
        return ~F.contains(text, F.lit(_NO_TEXT)) & F.coalesce(is_of_years, F.lit(False))

    def moment(self, text: Column, value: Column) -> Column:
        """Return what `value` returned as moments in the zone.

        NULL is a time that the zone's clocks do not show, or show twice, as `typed_values.from_texts` decides. A zone in the
        text leaves no choice.
        """
        # PySpark's stubs lack it. What Spark takes for deterministic it runs once more, to filter the rows.
        moments = F.arrow_udf(LocalTimes(self.zone).moments, "timestamp").asNondeterministic()  # type: ignore[attr-defined]
        in_zone: Column = moments(value.cast("string"))
        _, all_letters = letters_of(self._text)
        if not all_letters & _ZONES:
            return in_zone
        has_zone = value == self._by_spark(text, _ELSEWHERE)
        return F.when(has_zone, value).otherwise(in_zone)

    @property
    def _text(self) -> str:
        return self.options[PATTERNS[self.family]]

    def _by_spark(self, text: Column, zone: str) -> Column:
        options = {name: self.options[name] for name in (PATTERNS[self.family], "locale") if name in self.options}
        options |= {"timeZone": zone, "sep": _NO_TEXT, "quote": "", "nullValue": _NO_TEXT, "mode": "PERMISSIVE"}
        return F.from_csv(text, f"v {self.kind}", options).getField("v")
