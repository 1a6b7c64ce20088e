"""Splits text into records: lines, or for CSV the records of RFC 4180, which may span lines.

Counting records, reading them, and naming the line of a bad one all use this split. It works on whole blocks of bytes, or
record by record where quotes do not follow the RFC.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

# States refuse longer values, so a longer record could not be kept. This also limits the search for the end of a quote, and
# what is held in memory: of a longer record whose end has not come, the beginning is kept, and the rest passed over.
MAX_RECORD_BYTES, KEPT_OF_LONGER = 64 * 1024 * 1024, 64 * 1024
_TOO_LONG = f"it is longer than {MAX_RECORD_BYTES} bytes, or its quote is never closed"
_NEWLINE = re.compile(rb"\r\n|\r|\n")
_LF, _CR = 10, 13

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Grammar:
    r"""The rules for splitting text: line ends, and for CSV separators and quotes.

    `line_end` is None for any of ``\n``, ``\r\n`` and ``\r``. A line of nothing but `blanks` is a record only with
    `blank_lines`; a line that starts with `comment` never is. Without a separator a line is a record; with `whole` a file is.
    """

    separator: bytes | None = None
    quote: bytes = b'"'
    escape: bytes = b'"'
    comment: bytes = b""
    line_end: bytes | None = None
    blank_lines: bool = False
    blanks: bytes = b""
    whole: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether whole blocks can be split at once: every sign is one byte, and quotes are escaped by doubling."""
        return (
            self.separator is not None
            and len(self.separator) == len(self.quote or b"-") == len(self.line_end or b"-") == 1
            and self.escape == self.quote
            and not self.comment
        )

    @cached_property
    def newline(self) -> "re.Pattern[bytes]":
        """The pattern of a line end."""
        return _NEWLINE if self.line_end is None else re.compile(re.escape(self.line_end))

    @cached_property
    def value(self) -> "re.Pattern[bytes]":
        """The pattern of a CSV value, with groups `quoted` (the text inside the quotes) and `plain`."""
        assert self.separator is not None
        ends = rb"\r\n" if self.line_end is None else re.escape(self.line_end)
        if len(self.separator) == len(self.line_end or b"-") == 1:
            plain = rb"[^" + ends + re.escape(self.separator) + rb"]*+"
        else:
            plain = rb"(?:(?!" + re.escape(self.separator) + rb"|" + self.newline.pattern + rb")(?s:.))*+"
        if not self.quote:
            return re.compile(rb"(?P<quoted>(?!))|(?P<plain>" + plain + rb")")
        quote, escape = re.escape(self.quote), re.escape(self.escape)
        if self.escape == self.quote:
            inside = (
                rb"(?:[^" + quote + rb"]++|" + quote + quote + rb")*+"
                if len(self.quote) == 1
                else (rb"(?:(?!" + quote + rb")(?s:.)|" + quote + quote + rb")*+")
            )
        else:
            inside = rb"(?:(?!" + quote + rb"|" + escape + rb")(?s:.)|" + escape + rb"(?s:.))*+"
        return re.compile(quote + rb"(?P<quoted>" + inside + rb")" + quote + rb"|(?!" + quote + rb")(?P<plain>" + plain + rb")")

    @cached_property
    def values(self) -> "re.Pattern[bytes]":
        """The pattern of a CSV record: values with separators between them."""
        assert self.separator is not None
        value = re.sub(rb"\?P<\w+>", rb"?:", self.value.pattern)
        return re.compile(rb"(?:" + value + rb")(?:" + re.escape(self.separator) + rb"(?:" + value + rb"))*+")


@dataclass
class Chunk:
    """Whole records in a row: the start and end of each in `data`, and the line on which it starts.

    `bad` maps a record's index to the reason why it cannot be read. `reached` is the number of bytes of the text up to the
    end of this chunk, `next_line` the line after it.
    """

    data: bytes
    starts: Positions
    ends: Positions
    lines: Positions
    bad: dict[int, str] = field(default_factory=dict)
    reached: int = 0
    next_line: int = 1

    def __len__(self) -> int:
        return len(self.starts)

    def record(self, number: int) -> bytes:
        """Return one record as it is in the file, without its line end."""
        return self.data[self.starts[number] : self.ends[number]]

    def only(self, kept: NDArray[np.bool_]) -> "Chunk":
        """Return the chunk with the kept records only."""
        if kept.all():
            return self
        places = np.cumsum(kept) - 1
        bad = {int(places[number]): reason for number, reason in self.bad.items() if kept[number]}
        return replace(self, starts=self.starts[kept], ends=self.ends[kept], lines=self.lines[kept], bad=bad)


def chunk_of(records: list[bytes]) -> Chunk:
    """Return a chunk of records that are already split, each on one line."""
    lengths = np.array([len(record) for record in records], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths + 1)[:-1]]).astype(np.int64) if records else lengths
    return Chunk(b"\n".join(records), starts, starts + lengths, np.arange(1, len(records) + 1))


def chunks(blocks: Iterable[bytes], grammar: Grammar, line: int = 1) -> Iterator[Chunk]:
    """Split text into records and yield them in chunks; `line` is the number of its first line."""
    splitter = _WholeFile() if grammar.whole else _Splitter(grammar, line)
    for block in blocks:
        if len(chunk := splitter.feed(block)):
            yield chunk
    if len(chunk := splitter.feed(b"", final=True)):
        yield chunk


class _WholeFile:
    """Makes one record of all text; a file without text has no record."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._bytes = 0

    def feed(self, block: bytes, *, final: bool = False) -> Chunk:
        self._bytes += len(block)
        if self._bytes <= MAX_RECORD_BYTES + len(block):
            self._blocks.append(block)
        if not final or not any(self._blocks):
            return chunk_of([])
        if self._bytes > MAX_RECORD_BYTES:
            return replace(chunk_of([b"".join(self._blocks)[:KEPT_OF_LONGER]]), bad={0: _TOO_LONG})
        return chunk_of([b"".join(self._blocks)])


class _Splitter:
    """Splits blocks, and keeps an incomplete record until the next block."""

    def __init__(self, grammar: Grammar, line: int) -> None:
        self._grammar = grammar
        self._line = line
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._tried_bytes = 0
        self._reached = 0
        self._beginning: bytes | None = None  # of a record that is too long, whose end has not come yet

    def feed(self, block: bytes, *, final: bool = False) -> Chunk:
        if self._beginning is not None:
            return self._pass_over(block, self._beginning, final=final)
        self._rest.append(block)
        self._rest_bytes += len(block)
        # Text without a whole record is searched again only when it has doubled, because a record may span many blocks.
        if not final and self._rest_bytes < 2 * self._tried_bytes:
            return chunk_of([])
        data = b"".join(self._rest)
        chunk, end = self._split_at_once(data, final=final) or self._split_one_by_one(data, final=final)
        if not end and not final and len(data) > MAX_RECORD_BYTES + len(self._grammar.line_end or b"\r\n"):
            chunk, end = self._split_one_by_one(data, final=False, too_long=True)
            if not end:
                return self._pass_over(b"", data[:KEPT_OF_LONGER], final=False)
        chunk.bad = {
            **dict.fromkeys(np.flatnonzero(chunk.ends - chunk.starts > MAX_RECORD_BYTES).tolist(), _TOO_LONG),
            **chunk.bad,
        }
        rest = data[end:]
        self._rest, self._rest_bytes, self._tried_bytes = [rest], len(rest), 0 if end else len(rest)
        self._reached += end
        chunk.reached, chunk.next_line = self._reached, self._line
        return chunk if self._grammar.blank_lines else chunk.only(self._is_record(chunk))

    def _pass_over(self, block: bytes, beginning: bytes, *, final: bool) -> Chunk:
        """Drop what has come of a record that is too long; return its beginning, as bad, once its line has ended."""
        data = b"".join([*self._rest, block])
        end, is_whole = self._end_of_passed(data, final=final)
        self._rest, self._rest_bytes, self._tried_bytes = [data[end:]], len(data) - end, 0
        self._beginning = None if is_whole else beginning
        self._reached += end
        if not is_whole:
            return chunk_of([])
        chunk = replace(chunk_of([beginning]), lines=np.array([self._line], np.int64), bad={0: _TOO_LONG})
        self._line += 1
        chunk.reached, chunk.next_line = self._reached, self._line
        return chunk

    def _end_of_passed(self, data: bytes, *, final: bool) -> tuple[int, bool]:
        """Return where a line ends, or up to where it certainly goes on; and whether it ends."""
        line_end = self._grammar.line_end
        found = self._grammar.newline.search(data)
        if found and (final or line_end is not None or found.end() < len(data) or found.group() != b"\r"):
            return found.end(), True
        if final:
            return len(data), True
        # A line feed may follow a carriage return, or the rest of a longer line end.
        begun = int(data.endswith(b"\r")) if line_end is None else min(len(line_end) - 1, len(data))
        return len(data) - begun, False

    def _split_at_once(self, data: bytes, *, final: bool) -> tuple[Chunk, int] | None:
        """Split at line ends, with quotes if they are regular; None if only one record after the other can be found."""
        grammar = self._grammar
        if grammar.separator is not None and not grammar.is_plain:
            return None
        if grammar.separator is None or not grammar.quote or grammar.quote not in data:
            return self._split_lines(data, None, final=final)
        quotes = self._regular_quotes(data)
        return None if quotes is None else self._split_lines(data, quotes, final=final)

    def _is_record(self, chunk: Chunk) -> NDArray[np.bool_]:
        """Return a mask of the records that are not blank lines."""
        mask = chunk.ends > chunk.starts
        if blanks := self._grammar.blanks:
            text = np.frombuffer(chunk.data, np.uint8)
            starts_blank = mask & np.isin(text[np.minimum(chunk.starts, len(text) - 1)], list(blanks))
            for number in np.flatnonzero(starts_blank).tolist():
                mask[number] = bool(chunk.record(number).strip(blanks))
        return mask

    def _regular_quotes(self, data: bytes) -> Positions | None:
        """Return the positions of all quotes; None if one neither opens nor closes a value, nor is doubled inside one."""
        assert self._grammar.separator is not None
        text = np.frombuffer(data, np.uint8)
        quote, separator = self._grammar.quote[0], self._grammar.separator[0]
        line_ends = (_LF, _CR) if self._grammar.line_end is None else (self._grammar.line_end[0],)
        beside = np.zeros(256, np.bool_)
        beside[[separator, *line_ends]] = True
        quotes = np.flatnonzero(text == quote)
        opening, closing = quotes[0::2], quotes[1::2]
        opens = beside[text[np.maximum(opening - 1, 0)]] | (opening == 0)
        opens[1:] |= opening[1:] - 1 == closing[: len(opening) - 1]
        closes = beside[text[np.minimum(closing + 1, len(text) - 1)]] | (closing == len(text) - 1)
        closes[: len(opening) - 1] |= closing[: len(opening) - 1] + 1 == opening[1:]
        return quotes if opens.all() and closes.all() else None

    def _line_ends(self, data: bytes, *, final: bool) -> tuple[Positions, Positions]:
        """Return the start and end of each line end."""
        if self._grammar.line_end is not None:
            spans = [match.span() for match in self._grammar.newline.finditer(data)]
            begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
            return begins, ends
        text = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(text == _LF) + 1
        if b"\r" not in data:
            return ends - 1, ends
        begins = ends - 1 - ((ends > 1) & (text[np.maximum(ends - 2, 0)] == _CR))
        returns = np.flatnonzero(text == _CR)
        alone = returns[text[np.minimum(returns + 1, len(text) - 1)] != _LF]
        if data.endswith(b"\r") and not final:
            alone = alone[alone < len(text) - 1]  # a line feed may follow
        if not len(alone):
            return begins, ends
        order = np.argsort(np.concatenate([ends, alone + 1]))
        return np.concatenate([begins, alone])[order], np.concatenate([ends, alone + 1])[order]

    def _split_lines(self, data: bytes, quotes: Positions | None, *, final: bool) -> tuple[Chunk, int] | None:
        """Split at every line end that is not between quotes; return the records and the position after them.

        None if a quote is open at the end of the text.
        """
        begins, ends = self._line_ends(data, final=final)
        numbers = np.arange(len(ends))
        if quotes is not None:
            outside = np.searchsorted(quotes, begins) % 2 == 0
            begins, ends, numbers = begins[outside], ends[outside], numbers[outside]
            if final and len(quotes) % 2:
                return None
        starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        lines = self._line + np.concatenate([[0], numbers[:-1] + 1]) if len(ends) else ends
        end = int(ends[-1]) if len(ends) else 0
        following = self._line + int(numbers[-1]) + 1 if len(ends) else self._line
        if final and end < len(data):
            starts, begins = np.append(starts, end), np.append(begins, len(data))
            lines, end = np.append(lines, following), len(data)
        self._line = following
        return Chunk(data, starts, begins, lines), end

    def _split_one_by_one(self, data: bytes, *, final: bool, too_long: bool = False) -> tuple[Chunk, int]:
        """Split off one record at a time, while it is certain where the record ends."""
        grammar = self._grammar
        spans: list[tuple[int, int, int]] = []
        bad: dict[int, str] = {}
        place = 0
        while place < len(data):
            is_comment = bool(grammar.comment) and data.startswith(grammar.comment, place)
            if is_comment:
                reason, end = None, self._end_of_line(data, place)
            elif too_long and place == 0:
                reason, end = _TOO_LONG, self._end_of_line(data, place)
            else:
                reason, end = self._end_of_record(data, place, final=final)
            following = grammar.newline.match(data, end)
            if not final and (following is None or (following.group() == b"\r" and following.end() == len(data))):
                break  # the record may go on, or a line feed may follow
            if not is_comment:
                if reason is not None:
                    bad[len(spans)] = reason
                spans.append((place, end, self._line))
            reached = following.end() if following else len(data)
            self._line += len(grammar.newline.findall(data, place, reached))
            place = reached
        starts, ends, lines = np.array(spans, np.int64).reshape(-1, 3).T
        return Chunk(data, starts, ends, lines, bad), place

    def _end_of_line(self, data: bytes, place: int) -> int:
        line_end = self._grammar.newline.search(data, place)
        return line_end.start() if line_end else len(data)

    def _end_of_record(self, data: bytes, place: int, *, final: bool) -> tuple[str | None, int]:
        """Return the error of the record here, or None, and its end; the end of the data if that is not certain.

        A record with an error ends with its line.
        """
        grammar = self._grammar
        if grammar.separator is None:
            return None, self._end_of_line(data, place)
        values = grammar.values.match(data, place)
        end = values.end() if values else place
        if end == len(data) or (values and grammar.newline.match(data, end)):
            return None, end
        # A value here, or after this separator, opens a quote that is not closed; or text follows a closing quote.
        if values is None or data.startswith(grammar.separator, end):
            return ("a quote is opened and never closed", self._end_of_line(data, place)) if final else (None, len(data))
        if not final and len(data) - end < len(grammar.quote) + len(grammar.separator):
            return None, len(data)
        return "text follows a closing quote (a quote inside quotes is written twice)", self._end_of_line(data, place)
