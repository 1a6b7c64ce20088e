"""Reads text files, one row per line or, with the option wholetext, per file."""

from typing import TYPE_CHECKING

from jobs.sources.column_types import columns_of
from jobs.sources.files.formats.text_reader import TextFileReader, is_true, line_end_of

if TYPE_CHECKING:
    from jobs.sources.files.formats.text_scan import Parser


class TextReader(TextFileReader):
    """Reads text files; the one column is called ``value``."""

    known_options = ("encoding", "charset", "linesep", "wholetext")

    def row_schema(self) -> str:
        """Return the one column, and the partition columns."""
        return columns_of({"value": "string", **self._partitions.schema})

    def _make_parser(self) -> "Parser":
        from jobs.sources.files.formats.line_records import TextParser  # noqa: PLC0415
        from jobs.sources.files.formats.text_records import Grammar  # noqa: PLC0415 - declaring a pipeline must not load pyarrow

        self._header = False
        whole = is_true(self._options, "wholetext")
        return TextParser(Grammar(blank_lines=True, line_end=line_end_of(self._options), whole=whole))
