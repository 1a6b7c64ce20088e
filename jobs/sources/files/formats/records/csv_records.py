"""Parses CSV records to columns. `tidegate.jobs.sources.files.formats.records.text_records` has the grammar of a record."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from tidegate.jobs.sources.column_types import in_another_case
from tidegate.jobs.sources.files.formats.records import typed_values
from tidegate.jobs.sources.files.formats.records.record_parser import RecordParser
from tidegate.jobs.sources.files.formats.records.text_records import Chunk, Grammar, chunk_of, chunks

EMPTY_LINE = 'an empty line may be an empty value or none at all: write "" for an empty text, or remove the line'


@dataclass(frozen=True)
class CsvParser(RecordParser):
    """Turns the records of a CSV file into columns.

    `null` is the text that means NULL. A file's header assigns values to columns; without a header their order does.
    """

    null: str = ""
    has_header: bool = True

    def header(self, record: bytes) -> list[str] | None:
        """Return the column names in a file's first record, None if it is no record."""
        values = self._values(record)
        return None if values is None else [value or "" for value in values]

    def grammar_of(self, names: Sequence[str] | None) -> Grammar:
        """Return the grammar of a file with these columns: if there is one alone, an empty line may be a value."""
        return replace(self.grammar, blank_lines=True) if len(self.kinds if names is None else names) == 1 else self.grammar

    def again(self, record: bytes, names: Sequence[str] | None) -> Chunk:
        """Return a record that was split off before; refuse one that is none, or several, in a file with these columns."""
        if names is not None and not self.may_lack and (missing := [name for name in self.kinds if name not in names]):
            raise ValueError(f"its file has no column {missing[0]}{in_another_case(missing, names)}")
        if not record:
            raise ValueError(EMPTY_LINE)  # splitting would return no record
        split = list(chunks([record], self.grammar_of(names)))
        if [len(chunk) for chunk in split] != [1]:
            raise ValueError("its quotes do not make one record")
        if split[0].bad:
            raise ValueError(split[0].bad[0])
        return chunk_of([record])

    def parse(self, chunk: Chunk, names: Sequence[str] | None = None) -> tuple[dict[str, pa.Array], dict[int, str]]:
        """Return the columns of some records, and the errors by record index; a value with an error is NULL."""
        names = list(self.kinds) if names is None else names
        table = self._table_by_arrow(chunk, names)
        if table is None:
            texts, bad = self._texts_one_by_one(chunk, names)
        else:
            texts, bad = {name: table.column(name).combine_chunks() for name in table.column_names}, {}
        columns = {}
        for name, kind in self.kinds.items():
            values = texts[name] if name in texts else pa.nulls(len(chunk), pa.string())  # the file lacks the column
            if self.null:
                values = pc.if_else(pc.equal(values, self.null), pa.scalar(None, pa.string()), values)
            if name in self.formatted:
                columns[name] = values
                continue
            columns[name], refused = typed_values.from_texts(kind, values, self.zone)
            for number, reason in refused.items():
                bad.setdefault(number, f"column {name}: {reason}")
        return columns, bad

    def _table_by_arrow(self, chunk: Chunk, names: Sequence[str]) -> pa.Table | None:
        """Return the texts as Arrow reads them; None if it would read others than the grammar says, or refuses a record."""
        if chunk.bad or not self.grammar.is_plain or len(names) == 1:
            return None
        first, last = int(chunk.starts[0]), int(chunk.ends[-1])
        if not self._present(names) or not self._is_read_alike(chunk.data, first, last):
            return None
        table = self._read(chunk.data, first, last, names)
        return table if table is not None and table.num_rows == len(chunk) else None

    def _read(self, content: bytes, first: int, last: int, names: Sequence[str]) -> pa.Table | None:
        """Read all records at once; None if one of them does not fit."""
        # Without a line end after it, Arrow takes an empty last value for a quoted one.
        whole = content if last < len(content) else content + b"\n"
        data = pa.py_buffer(whole)[first : last + 1]
        assert self.grammar.separator is not None
        try:
            table = csv.read_csv(
                pa.BufferReader(data),
                csv.ReadOptions(column_names=[str(n) for n in range(len(names))], use_threads=False, block_size=len(data) + 1),
                csv.ParseOptions(
                    delimiter=self.grammar.separator.decode(),
                    quote_char=self.grammar.quote.decode() or False,
                    newlines_in_values=True,
                ),
                csv.ConvertOptions(
                    column_types={str(number): pa.string() for number in range(len(names))},
                    include_columns=[str(names.index(name)) for name in self._present(names)],
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid:
            return None
        return table.rename_columns(self._present(names))

    def _present(self, names: Sequence[str]) -> list[str]:
        """Return the declared columns that a file has."""
        return [name for name in self.kinds if name in names]

    def _is_read_alike(self, data: bytes, first: int, last: int) -> bool:
        """Whether Arrow finds these records where the grammar does, and reads every character of them."""
        if data.startswith(codecs.BOM_UTF8, first):
            return False  # Arrow skips a mark at the start of each buffer, here the first character of a value
        if self.grammar.line_end is None:
            return True
        # To Arrow a carriage return always ends a line. Where another line end is declared, it belongs to the value.
        return self.grammar.line_end == b"\n" and data.find(b"\r", first, last) < 0

    def _texts_one_by_one(self, chunk: Chunk, names: Sequence[str]) -> tuple[dict[str, pa.Array], dict[int, str]]:
        bad = dict(chunk.bad)
        present = self._present(names)
        places = [names.index(name) for name in present]
        rows: list[list[str | None]] = []
        for number in range(len(chunk)):
            values = None
            if number not in bad:
                record = chunk.record(number)
                values = self._values(record)
                if values is None:
                    bad[number] = "its quotes do not make a record"
                elif not record:
                    bad[number], values = EMPTY_LINE, None
                elif len(values) != len(names):
                    bad[number], values = f"it has {len(values)} value(s), the {len(names)} columns need one each", None
            rows.append([None] * len(places) if values is None else [values[place] for place in places])
        columns = zip(*rows, strict=True) if rows else [[] for _ in places]
        return {name: pa.array(list(column), pa.string()) for name, column in zip(present, columns, strict=True)}, bad

    def _values(self, record: bytes) -> list[str | None] | None:
        """Return the values of one record, None if it is no record."""
        grammar = self.grammar
        assert grammar.separator is not None
        values: list[str | None] = []
        place = 0
        while True:
            match = grammar.value.match(record, place)
            if not match:
                return None
            if (quoted := match["quoted"]) is not None:
                values.append(self._unescaped(quoted).decode())
            else:
                values.append(match["plain"].decode() or None)
            place = match.end()
            if place == len(record):
                return values
            if not record.startswith(grammar.separator, place):
                return None
            place += len(grammar.separator)

    def _unescaped(self, quoted: bytes) -> bytes:
        grammar = self.grammar
        if grammar.escape == grammar.quote:
            return quoted.replace(grammar.quote * 2, grammar.quote)
        # Before any other character the escape is data, as in Spark.
        return quoted.replace(grammar.escape + grammar.quote, grammar.quote).replace(grammar.escape * 2, grammar.escape)
