"""Reads files of JSON lines: turns the source's options into a parser of JSON records."""

from tidegate.jobs.sources.column_types import parse_type
from tidegate.jobs.sources.files.formats.records.json_records import JsonParser
from tidegate.jobs.sources.files.formats.records.text_records import Grammar
from tidegate.jobs.sources.files.formats.text_files.text_options import PATTERNS, line_end_of, named, zone_of
from tidegate.jobs.sources.files.formats.text_files.text_reader import TextFileReader


class JsonReader(TextFileReader):
    """Reads files of JSON lines."""

    def _make_parser(self) -> JsonParser:
        self._header = False
        self.may_lack = self._source.missing == "null"
        kinds = {name: parse_type(text) for name, text in self._schema.items()}
        formatted = frozenset(name for name, kind in kinds.items() if PATTERNS.get(kind.family) in named(self._options))
        grammar = Grammar(blanks=b" \t", line_end=line_end_of(self._options))
        return JsonParser(kinds, grammar, zone_of(self._options), formatted, frozenset(self._partitions.schema))
