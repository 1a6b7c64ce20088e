"""Reads random inputs by the parsers, in this process, and compares with an oracle of its own.

An input is read in one of two ways, and has only these outcomes:

    together   Many inputs make a batch whose bad records are set aside. The rows must be those that the oracle read; records
               that the oracle calls bad must be set aside, with file, line, reason and raw text, and again when replayed.
    alone      One input makes a batch. Its rows are those that the oracle read, or it is refused as a whole with a reason that
               names it. Inputs that the oracle does not accept as a file of the format are read like this, and so are those of
               a batch with a wrong result, to find the wrong one.

Any other outcome, such as an exception of Python's, is a failure. It shows the input, and how to reproduce it.

The oracle must not share code with the product. Its verdict on a record is COUNTS if the record is undoubtedly right, so that
a refusal is an error too; REFUSED if it has no exact meaning; EITHER if a strict reader may refuse it, but a reader that
accepts it must read the same values. Everything is drawn from one `random.Random` per round, whose seed is printed.
"""

import json
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pytest

from tests.fuzz.files import File
from tests.sources.in_process import ThisProcess
from tests.store import Attempt
from tidegate.jobs.sources import ORIGIN, PAYLOAD, REFUSAL, Source
from tidegate.jobs.sources.binding import coordinator_of, emitter_of
from tidegate.jobs.sources.files import content
from tidegate.jobs.sources.files.formats.text_files import text_reader, text_scan
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import TidegateError

KEPT = {ORIGIN: "origin", PAYLOAD: "payload"}
SHOWN = 2000


class Verdict(Enum):
    """From the mildest to the strictest."""

    COUNTS = "counts"
    EITHER = "counts or is refused"
    REFUSED = "is refused"


def strictest(*verdicts: Verdict) -> Verdict:
    return max(verdicts, key=list(Verdict).index)


@dataclass(frozen=True)
class Column:
    """A column of the source, and its type."""

    name: str
    type: str

    def comparable(self, value: Any) -> Any:
        """Return a value that was read as the oracle writes it."""
        return number_key(value, self.type) if value is not None and self.type in ("double", "float") else value


def number_key(number: float, kind: str) -> str:
    """Return a text that is unique to a number, NaN included; both zeros are one, as in Spark's groups."""
    number = number + 0.0 if number else 0.0
    return repr(struct.unpack("f", struct.pack("f", number))[0] if kind == "float" else number)


@dataclass(frozen=True)
class Record:
    """A record as the oracle read it: its place, its values in the order of the columns, and its raw text."""

    origin: str | None
    verdict: Verdict
    row: tuple = ()
    raw: str | None = None


@dataclass(frozen=True)
class Input:
    """One input, such as a file, and its records by the oracle; `is_whole` is False if it has to be refused as a whole."""

    name: str
    content: Any
    records: Sequence[Record] = ()
    is_whole: bool = True

    @property
    def verdict(self) -> Verdict:
        """The input's outcome when it is read alone: one record decides for all."""
        whole = Verdict.COUNTS if self.is_whole else Verdict.REFUSED
        return strictest(whole, *(record.verdict for record in self.records))

    @property
    def has_nul(self) -> bool:
        """Whether a text has a NUL character: no state may, so the whole batch would be refused for it."""
        return any(map(_has_nul, (record.row for record in self.records)))


@dataclass(frozen=True)
class Declared:
    """The declarations of one round; `source` takes the number of inputs per batch."""

    source: Callable[[int], Source]
    columns: Sequence[Column]
    details: str
    file: File = field(default=File())
    block_bytes: int = content.READ_BLOCK_BYTES
    piece_bytes: int = text_scan.RANGE_BYTES
    here_bytes: int = text_reader.HERE_BYTES


class Format(Protocol):
    """Draws declarations and inputs of one format, with an oracle of its own."""

    name: str

    def declare(self, draw: random.Random) -> Declared:
        """Draw the declarations of a round."""

    def make(self, draw: random.Random, declared: Declared, name: str) -> Input:
        """Draw an input of this name, and read it with the oracle."""


@dataclass
class Fuzz:
    """Runs rounds of inputs of one format, each in a folder of its own, and collects failures."""

    folder: Path
    format: Format
    seed: int
    found: list[str] = field(default_factory=list)
    inputs: int = 0
    refused: int = 0
    records: int = 0
    quarantined: int = 0
    _homes: int = 0
    _title: str = ""

    def round(self, number: int, inputs: int, per_batch: int) -> None:
        draw = random.Random(f"{self.seed}/{self.format.name}/{number}")
        declared = self.format.declare(draw)
        drawn = [self.format.make(draw, declared, f"{place:04d}") for place in range(inputs)]
        self._title = f"{self.format.name}, FUZZ_SEED={self.seed} FUZZ_ROUND={number}: {declared.details}"
        alone = [each for each in drawn if not each.is_whole or each.has_nul]
        together = [each for each in drawn if each not in alone]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(content, "READ_BLOCK_BYTES", declared.block_bytes)
            patch.setattr(text_scan, "RANGE_BYTES", declared.piece_bytes)
            patch.setattr(text_reader, "HERE_BYTES", declared.here_bytes)
            if why := self._read_together(declared, together, per_batch):
                before = len(self.found)
                self._read_alone(declared, together)
                if len(self.found) == before:
                    self._note(why)
            self._read_alone(declared, alone)
        self.inputs += inputs
        self.records += sum(len(each.records) for each in drawn)

    def _read_together(self, declared: Declared, inputs: list[Input], per_batch: int) -> str | None:
        """Read inputs in batches; return the difference from the oracle, None if there is none."""
        if not inputs:
            return None
        place = self._place(declared.source(per_batch), inputs)
        try:
            place.read_records()
        except TidegateError as error:
            return f"the batch was refused: {error}"
        wrong = _difference(declared, inputs, place)
        if not wrong and place.waiting:
            before = place.waiting
            place.replay()
            self.quarantined += len(before)
            was, now = (Counter((r["origin"], r["payload"], r["reason"]) for r in them) for them in (before, place.waiting))
            if was != now:
                return f"replayed, there is in quarantine {_shown(now - was)} instead of {_shown(was - now)}"
            wrong = _difference(declared, inputs, place)
        return wrong

    def _read_alone(self, declared: Declared, inputs: list[Input]) -> None:
        """Read each input as a batch of its own, and note the failures."""
        if not inputs:
            return
        place = self._place(declared.source(1), inputs)
        refusals = place.read_batches()
        expected: Counter[tuple] = Counter()
        for txid, each in enumerate(inputs, start=1):
            if txid not in refusals:
                if each.verdict is Verdict.REFUSED:
                    self._note(f"it was accepted: {_bad_of(each)}", each)
                expected.update(record.row for record in each.records)
                continue
            self.refused += 1
            if each.verdict is Verdict.COUNTS:
                self._note(f"it was refused: {refusals[txid]}", each)
            if each.name not in refusals[txid] and not each.has_nul:
                self._note(f"the refusal does not name it: {refusals[txid]}", each)
        if (found := place.rows(declared)) == expected:
            return
        more, less = _shown(found - expected), _shown(expected - found)
        of = {record.row: each for each in inputs for record in each.records}
        culprit = next((of[row] for row in expected - found), None)
        self._note(f"the rows have {more}, and not {less}", culprit or (inputs[0] if len(inputs) == 1 else None))

    def _place(self, source: Source, inputs: list[Input]) -> "_Place":
        self._homes += 1
        place = _Place(self.folder / str(self._homes), source)
        (place.settings.home / "inbox").mkdir()
        for each in inputs:
            (place.settings.home / "inbox" / each.name).write_bytes(each.content)
        return place

    def _note(self, why: str, each: Input | None = None) -> None:
        shown = f"\n  {each.name}: {each.content[:SHOWN]!r}" if each else ""
        self.found.append(f"{self._title}\n  {why[:SHOWN]}{shown}")


class _Place:
    """A folder whose files are read as Spark's tasks read them; good rows and what is set aside are kept here."""

    def __init__(self, home: Path, source: Source) -> None:
        home.mkdir(parents=True)
        self.settings = Settings(home=home, min_file_age_seconds=0)
        self.waiting: list[dict[str, Any]] = []
        self._source = source
        self._good: list[dict[str, Any]] = []

    def read_records(self) -> None:
        for metadata in self._batches():
            self._keep(self._emitter().emit_records(Attempt("fuzz", 1, 1, metadata), metadata))

    def read_batches(self) -> dict[int, str]:
        """Read all batches, each whole or not at all; return the refusals by txid."""
        refusals: dict[int, str] = {}
        for txid, metadata in enumerate(self._batches(), start=1):
            try:
                found = self._emitter().emit_batch(Attempt("fuzz", txid, 1, metadata), metadata).table.to_pylist()
            except TidegateError as error:
                refusals[txid] = str(error)
                continue
            if any(_has_nul(row.values()) for row in found):
                refusals[txid] = "no state takes NUL"
            else:
                self._good += found
        return refusals

    def replay(self) -> None:
        columns = {name: pa.array([record[key] for record in self.waiting], pa.string()) for name, key in KEPT.items()}
        self.waiting = []
        self._keep(self._emitter().parse_payloads(ThisProcess(pa.RecordBatch.from_pydict(columns))))

    def rows(self, declared: Declared) -> "Counter[tuple]":
        return Counter(tuple(column.comparable(row[column.name]) for column in declared.columns) for row in self._good)

    def _batches(self) -> Iterator[Any]:
        coordinator, previous = coordinator_of(self._source, self.settings), None
        for txid in count(1):
            if (previous := coordinator.initialize_transaction(txid, previous, None)) is None:
                return
            yield previous

    def _emitter(self) -> Any:
        return emitter_of(self._source, ThisProcess(), self.settings)  # type: ignore[arg-type]

    def _keep(self, rows: Any) -> None:
        for row in rows.table.to_pylist():
            if row[REFUSAL]:
                self.waiting.append({"reason": row[REFUSAL], **{key: row[name] for name, key in KEPT.items()}})
            else:
                assert not _has_nul(row.values()), "such inputs are read alone"
                self._good.append(row)


def _has_nul(row: Iterable[Any]) -> bool:
    return any(isinstance(value, str) and "\0" in value for value in row)


def _difference(declared: Declared, inputs: list[Input], place: _Place) -> str | None:
    """Return how rows and quarantine differ from the oracle, None if they do not."""
    waiting = place.waiting
    by_origin = Counter(record["origin"] for record in waiting)
    expected: Counter[tuple] = Counter()
    raws: dict[str | None, str | None] = {}
    for record in (record for each in inputs for record in each.records):
        if record.verdict is Verdict.REFUSED or (record.verdict is Verdict.EITHER and by_origin[record.origin]):
            if by_origin[record.origin] == 0:
                return f"{record.origin} was accepted: {record.raw!r}"
            by_origin[record.origin] -= 1
            raws[record.origin] = record.raw
        else:
            expected[record.row] += 1
    if left := +by_origin:
        whys = [r["reason"] for r in waiting if r["origin"] in left][:3]
        return f"refused though right: {_shown(left)}: {whys}"
    for each in waiting:
        if not each["reason"]:
            return f"{each['origin']} waits without a reason"
        if raws[each["origin"]] is not None and (kept := raw_of(each["payload"])) != raws[each["origin"]]:
            return f"{each['origin']} waits as {kept!r}, and is {raws[each['origin']]!r}"
    found = place.rows(declared)
    if found != expected:
        return f"the rows have {_shown(found - expected)}, and not {_shown(expected - found)}"
    return None


def raw_of(payload: str) -> str:
    if payload.startswith('{"_tidegate_record"'):
        found = json.loads(payload)["_tidegate_record"]
        assert isinstance(found, str)
        return found
    return payload


def _bad_of(each: Input) -> str:
    bad = [f"{record.origin}: {record.raw!r}" for record in each.records if record.verdict is Verdict.REFUSED]
    return f"bad are {bad[:3]}" if bad else "the oracle cannot read it"


def _shown(counter: "Counter[Any]") -> str:
    text = repr(dict(counter.most_common(5)))
    return text if len(text) < SHOWN else f"{text[:SHOWN]}..."
