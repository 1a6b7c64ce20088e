"""The text formats: CSV, JSON lines and plain text. Each turns the source's options into a parser of its records."""

from tidegate.jobs.sources.column_types import columns_of, parse_type
from tidegate.jobs.sources.files.formats.records.csv_records import CsvParser
from tidegate.jobs.sources.files.formats.records.json_records import JsonParser
from tidegate.jobs.sources.files.formats.records.line_records import TextParser
from tidegate.jobs.sources.files.formats.records.text_records import Grammar
from tidegate.jobs.sources.files.formats.text_files.text_options import PATTERNS, is_true, line_end_of, named, zone_of
from tidegate.jobs.sources.files.formats.text_files.text_reader import TextFileReader


class CsvReader(TextFileReader):
    """Reads CSV files."""

    def _make_parser(self) -> CsvParser:
        options = named(self._options)
        kinds = {name: parse_type(text) for name, text in self._schema.items()}
        quote = options.get("quote", '"')
        strip_left, strip_right = (is_true(self._options, f"ignore{side}whitespace") for side in ("leading", "trailing"))
        grammar = Grammar(
            separator=self._source.separator.encode(),
            quote=quote.encode(),
            # Spark's default escape is a backslash; other writers double the quote.
            escape=(options.get("escape", '"') if options.get("escape", '"') != '"' else quote).encode() if quote else b"",
            comment=options.get("comment", "").encode(),
            line_end=line_end_of(self._options),
            blanks_around_quotes=strip_left or strip_right,
        )
        return CsvParser(
            kinds,
            grammar,
            null=options.get("nullvalue", ""),
            empty=options.get("emptyvalue", ""),
            zone=zone_of(self._options),
            formatted=frozenset(name for name, kind in kinds.items() if PATTERNS.get(kind.family) in options),
            strip_left=strip_left,
            strip_right=strip_right,
            may_lack=self._source.missing == "null",
        )


class JsonReader(TextFileReader):
    """Reads files of JSON lines."""

    def _make_parser(self) -> JsonParser:
        self._header = False
        self.may_lack = self._source.missing == "null"
        kinds = {name: parse_type(text) for name, text in self._schema.items()}
        formatted = frozenset(name for name, kind in kinds.items() if PATTERNS.get(kind.family) in named(self._options))
        grammar = Grammar(blanks=b" \t", line_end=line_end_of(self._options))
        elsewhere, ignored = frozenset(self._partitions.schema), frozenset(self._source.ignored_columns)
        return JsonParser(kinds, grammar, zone_of(self._options), formatted, elsewhere, ignored=ignored)


class TextReader(TextFileReader):
    """Reads text files, one row per line or, with wholetext, per file; the one column is called ``value``."""

    def row_schema(self) -> str:
        """Return the one column, and the partition columns."""
        return columns_of({"value": "string", **self._partitions.schema})

    def _make_parser(self) -> TextParser:
        self._header = False
        whole = is_true(self._options, "wholetext")
        return TextParser(Grammar(blank_lines=True, line_end=line_end_of(self._options), whole=whole))
