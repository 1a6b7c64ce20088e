"""Reads files of JSON lines: turns the source's options into a parser of JSON records."""

from typing import TYPE_CHECKING

from jobs.sources.column_types import parse_type
from jobs.sources.files.formats.text_reader import TextFileReader, line_end_of, named, zone_of
from jobs.sources.files.formats.time_patterns import FORMATS

if TYPE_CHECKING:
    from jobs.sources.files.formats.text_scan import Parser


class JsonReader(TextFileReader):
    """Reads files of JSON lines."""

    known_options = ("encoding", "charset", "linesep", *FORMATS.values(), "locale", "timezone")

    def _make_parser(self) -> "Parser":
        from jobs.sources.files.formats.json_records import JsonParser  # noqa: PLC0415 - declaring a pipeline must not load pyarrow
        from jobs.sources.files.formats.text_records import Grammar  # noqa: PLC0415

        self._header = False
        self.may_lack = self._source.missing == "null"
        kinds = {name: parse_type(text) for name, text in self._schema.items()}
        formatted = frozenset(name for name, kind in kinds.items() if FORMATS.get(kind.family) in named(self._options))
        grammar = Grammar(blanks=b" \t", line_end=line_end_of(self._options))
        return JsonParser(kinds, grammar, zone_of(self._options), formatted, frozenset(self._partitions.schema))
