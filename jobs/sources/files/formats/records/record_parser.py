"""What the parsers of all text formats have in common; and that of plain text, whose lines are the rows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from tidegate.jobs.sources.column_types import SparkType
from tidegate.jobs.sources.files.formats.records.text_records import Chunk, Grammar, chunk_of


@dataclass(frozen=True)
class RecordParser(ABC):
    """Turns records into columns.

    `kinds` are the types of the declared columns by name; `formatted` are those whose texts Spark converts, by the author's
    pattern. `zone` is that of timestamps without one. Columns that a file `may_lack` are NULL.
    """

    kinds: dict[str, SparkType]
    grammar: Grammar
    zone: str = "UTC"
    formatted: frozenset[str] = frozenset()
    may_lack: bool = False

    @cached_property
    def types(self) -> dict[str, pa.DataType]:
        """The Arrow types of the columns that `parse` returns."""
        return {name: pa.string() if name in self.formatted else kind.arrow for name, kind in self.kinds.items()}

    @abstractmethod
    def parse(self, chunk: Chunk, names: Sequence[str] | None = None) -> tuple[dict[str, pa.Array], dict[int, str]]:
        """Return the columns of some records, and the errors by record index; a value with an error is NULL.

        `names` are the file's columns, if they differ from the declared ones.
        """

    def grammar_of(self, names: Sequence[str] | None) -> Grammar:
        """Return the grammar of a file with these columns."""
        del names
        return self.grammar

    def again(self, record: bytes, names: Sequence[str] | None) -> Chunk:
        """Return a record that was split off before, from a file with these columns.

        Raises: ValueError if it is no record of such a file by today's declaration.
        """
        del names
        return chunk_of([record])


@dataclass(frozen=True)
class TextParser(RecordParser):
    """Turns lines of text into the one column ``value``."""

    def parse(self, chunk: Chunk, names: Sequence[str] | None = None) -> tuple[dict[str, pa.Array], dict[int, str]]:
        """Return the lines."""
        del names
        lines = [chunk.data[start:end] for start, end in zip(chunk.starts.tolist(), chunk.ends.tolist(), strict=True)]
        return {"value": pa.array(lines, pa.binary()).cast(pa.string())}, dict(chunk.bad)
