"""Reads text files, one row per line or, with the option wholetext, per file."""

from tidegate.jobs.sources.column_types import columns_of
from tidegate.jobs.sources.files.formats.records.line_records import TextParser
from tidegate.jobs.sources.files.formats.records.text_records import Grammar
from tidegate.jobs.sources.files.formats.text_files.text_options import is_true, line_end_of
from tidegate.jobs.sources.files.formats.text_files.text_reader import TextFileReader


class TextReader(TextFileReader):
    """Reads text files; the one column is called ``value``."""

    def row_schema(self) -> str:
        """Return the one column, and the partition columns."""
        return columns_of({"value": "string", **self._partitions.schema})

    def _make_parser(self) -> TextParser:
        self._header = False
        whole = is_true(self._options, "wholetext")
        return TextParser(Grammar(blank_lines=True, line_end=line_end_of(self._options), whole=whole))
