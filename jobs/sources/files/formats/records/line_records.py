"""Plain text: each line is a row."""

from dataclasses import dataclass

import pyarrow as pa

from tidegate.jobs.sources.files.formats.records.text_records import Chunk, Grammar


@dataclass(frozen=True)
class TextParser:
    """Turns lines of text into the one column ``value``."""

    grammar: Grammar
    formatted: frozenset[str] = frozenset()

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The Arrow types of the columns that `parse` returns."""
        return {"value": pa.string()}

    def parse(self, chunk: Chunk, names: object = None) -> tuple[dict[str, pa.Array], dict[int, str]]:
        """Return the lines."""
        del names
        lines = [chunk.data[start:end] for start, end in zip(chunk.starts.tolist(), chunk.ends.tolist(), strict=True)]
        return {"value": pa.array(lines, pa.binary()).cast(pa.string())}, dict(chunk.bad)
