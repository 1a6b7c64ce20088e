"""Runs random inputs through the whole path, or through parsers in this process, and compares with an oracle of its own.

An input is read in one of two ways, and has only these outcomes:

    together   Many inputs make a batch, on_poison="quarantine". Their state must be the rows that the oracle read; records that
               the oracle calls bad must be in quarantine, with file, line, reason and raw text.
    alone      One input makes a batch, on_poison="skip". Its rows count as the oracle read them, or it is refused as a whole
               with a reason that names it. Inputs that the oracle does not accept as a file of the format are read like this,
               and so are those of a batch with a wrong result, to find the wrong one.

Any other outcome, such as an exception of Python's or Spark's, is a failure. It shows the input, and how to reproduce it.

To add a format, write a class with the three methods of `Format`, and put it into `FORMATS` of ``test_fuzz``:

    declare  draw a declaration: the source, the columns and how their types are kept in a state, and how the reader is tuned
    make     draw one input for it, and let the oracle read it: `Input` with a `Record` per record of the input
    put      write inputs to where the source reads them; the default writes files into the folder ``inbox``

The oracle must not share code with the product. Its verdict on a record is COUNTS if the record is undoubtedly right, so that
a refusal is an error too; REFUSED if it has no exact meaning; EITHER if a strict reader may refuse it, but a reader that
accepts it must read the same values. Everything is drawn from one `random.Random` per round, whose seed is printed.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pytest

from tests.conftest import register_pipelines
from tests.servers import Server
from tests.sources.in_process import ThisProcess
from tests.store import Attempt
from tidegate.jobs import Count, Pipeline, State
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.jobs.sources import ORIGIN, PAYLOAD, REFUSAL, Source
from tidegate.jobs.sources.binding import coordinator_of, emitter_of
from tidegate.jobs.sources.files import content
from tidegate.jobs.sources.files.formats.text_files import text_reader, text_scan
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import TidegateError

KEPT = {ORIGIN: "origin", PAYLOAD: "payload"}
PIPELINE = "fuzz"  # one name, so that all rounds share one Spark session
SHOWN = 2000


class Verdict(Enum):
    COUNTS = "counts"
    EITHER = "counts or is refused"
    REFUSED = "is refused"


@dataclass(frozen=True)
class Column:
    """A column of the source: its type, how the state's key keeps it, and how the key is read back."""

    name: str
    type: str
    kept_as: str
    expression: str | None = None
    read_back: Callable[[Any], Any] = field(default=lambda value: value)

    def here(self, value: Any) -> Any:
        """Return a value that was read in this process as the oracle writes it."""
        return self.read_back(str(value)) if value is not None and self.type in ("double", "float") else value


@dataclass(frozen=True)
class Record:
    """A record as the oracle read it: its place, its values in the order of the columns, and its raw text."""

    origin: str | None
    verdict: Verdict
    row: tuple = ()
    raw: str | None = None


@dataclass(frozen=True)
class Input:
    """One input, such as a file, and its records by the oracle; `is_whole` is False if it has to be refused as a whole.

    With `may_refuse` it may be refused as a whole even if its records are right.
    """

    name: str
    content: Any
    records: Sequence[Record] = ()
    is_whole: bool = True
    may_refuse: bool = False

    @property
    def verdict(self) -> Verdict:
        """The input's outcome when it is read alone: one record decides for all."""
        verdicts = {record.verdict for record in self.records}
        if not self.is_whole or Verdict.REFUSED in verdicts:
            return Verdict.REFUSED
        return Verdict.EITHER if self.may_refuse or Verdict.EITHER in verdicts else Verdict.COUNTS

    @property
    def has_nul(self) -> bool:
        """Whether a text has a NUL character: no key may, and after a transform the whole batch is refused for it."""
        return any(isinstance(value, str) and "\0" in value for record in self.records for value in record.row)


@dataclass(frozen=True)
class Declared:
    """The declarations of one round; `source` takes the number of inputs per batch."""

    source: Callable[[int], Source]
    columns: Sequence[Column]
    details: str
    block_bytes: int = content.READ_BLOCK_BYTES
    piece_bytes: int = text_scan.RANGE_BYTES
    here_bytes: int = text_reader.HERE_BYTES

    def pipeline(self, inputs_per_batch: int, on_poison: str) -> Pipeline:
        key = {f"k{number}": column.kept_as for number, column in enumerate(self.columns)}
        named = [f"{column.expression or _quoted(column.name)} AS k{n}" for n, column in enumerate(self.columns)]
        return Pipeline(
            name=PIPELINE,
            source=self.source(inputs_per_batch),
            transform=lambda rows: rows.selectExpr(*named),
            states={"per_row": State(key=key, aggregates={"times": Count()}, null_keys=True)},
            on_poison=on_poison,  # type: ignore[arg-type]
            tries=1,
            retry_delay_seconds=0,
        )


class Format(Protocol):
    """Draws declarations and inputs of one format, with an oracle of its own."""

    name: str

    def declare(self, draw: random.Random) -> Declared:
        """Draw the declarations of a round."""

    def make(self, draw: random.Random, declared: Declared, name: str) -> Input:
        """Draw an input of this name, and read it with the oracle."""

    def put(self, settings: Settings, inputs: Iterable[Input]) -> None:
        """Write inputs to where the source reads them, in the order of their names."""
        folder = settings.home / "inbox"
        folder.mkdir(exist_ok=True)
        for each in inputs:
            (folder / each.name).write_bytes(each.content)


@dataclass
class Fuzz:
    """Runs rounds of inputs of one format, each in a place of its own, and collects failures; without a server here."""

    server: Server | None
    template: str
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
        pipeline = declared.pipeline(per_batch, "quarantine")
        with self._place(pipeline) as place:
            self.format.put(place.settings, inputs)
            try:
                place.run("together")
            except TidegateError as error:
                if any(each.may_refuse for each in inputs):
                    self._read_alone(declared, inputs)
                    return None
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
        pipeline = declared.pipeline(1, "skip")
        with self._place(pipeline) as place:
            self.format.put(place.settings, inputs)
            refusals = place.run_all()
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
            if (found := place.state(declared)) == expected:
                return
            more, less = _shown(found - expected), _shown(expected - found)
            of = {record.row: each for each in inputs for record in each.records}
            culprit = next((of[row] for row in expected - found), None)
            self._note(f"the state has {more}, and not {less}", culprit or (inputs[0] if len(inputs) == 1 else None))

    def _place(self, pipeline: Pipeline) -> "_Place | _Here":
        self._homes += 1
        home = self.folder / str(self._homes)
        home.mkdir(parents=True)
        return _Place(self.server, self.template, home, pipeline) if self.server else _Here(home, pipeline)

    def _note(self, why: str, each: Input | None = None) -> None:
        shown = f"\n  {each.name}: {each.content[:SHOWN]!r}" if each else ""
        self.found.append(f"{self._title}\n  {why[:SHOWN]}{shown}")


class _Place:
    """A database and a folder for one run over one set of inputs."""

    def __init__(self, server: Server, template: str, home: Path, pipeline: Pipeline) -> None:
        self._server = server
        self.pipeline = pipeline
        self._database = server.create_database(template)
        self.settings = replace(server.settings, pg_database=self._database, home=home)

    def __enter__(self) -> "_Place":
        register_pipelines(self.settings, self.pipeline)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.drop_database(self._database)

    def run(self, run_id: str) -> None:
        run_pipeline(self.settings, self.pipeline, run_id=run_id)

    def run_all(self) -> dict[int, str]:
        """Run until no batch is left, skipping refused ones; return the refusals by txid."""
        refusals: dict[int, str] = {}
        for number in count():
            try:
                txids = run_pipeline(self.settings, self.pipeline, run_id=f"run {number}").txids
            except TidegateError as error:
                with StateStore.connect(self.settings) as store:
                    statuses = store.batch_statuses(PIPELINE, limit=10_000)
                    txid = next(each.txid for each in statuses if str(error) in (each.waits_for or ""))
                    store.skip_batch(self.pipeline.spec, txid, "fuzz", "refused")
                refusals[txid] = str(error)
                continue
            if not txids:
                break
        with StateStore.connect(self.settings) as store:
            for status in store.batch_statuses(PIPELINE, limit=10_000):
                assert status.phase in ("committed", "skipped"), status
                if status.phase == "skipped" and status.txid not in refusals:
                    commit = store.batch_history(PIPELINE, status.txid).commit
                    assert commit is not None
                    refusals[status.txid] = commit["skipped_reason"]
        return refusals

    def replay(self) -> None:
        with StateStore.connect(self.settings) as store:
            store.replay_quarantined(self.pipeline.spec, "fuzz", "again")
        self.run("replay")

    @property
    def waiting(self) -> list[dict[str, Any]]:
        with StateStore.connect(self.settings) as store:
            return list(store.quarantined(PIPELINE))

    def state(self, declared: Declared) -> "Counter[tuple]":
        spec = self.pipeline.spec.states[0]
        found: Counter[tuple] = Counter()
        with StateStore.connect(self.settings) as store:
            for row in store.state_rows(spec):
                values = [row[f"k{number}"] for number in range(len(declared.columns))]
                read = [None if v is None else c.read_back(v) for v, c in zip(values, declared.columns, strict=True)]
                found[tuple(read)] += row["times"]
        return found


class _Here:
    """A folder whose files are read in this process, as Spark's tasks read them; what counts and what waits is kept here."""

    def __init__(self, home: Path, pipeline: Pipeline) -> None:
        self.settings = Settings(home=home, min_file_age_seconds=0)
        self.waiting: list[dict[str, Any]] = []
        self._source = pipeline.source
        self._good: list[dict[str, Any]] = []

    def __enter__(self) -> "_Here":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, _run_id: str) -> None:
        for metadata in self._batches():
            self._keep(self._emitter().emit_records(Attempt(PIPELINE, 1, 1, metadata), metadata))

    def run_all(self) -> dict[int, str]:
        """Read all batches, each whole or not at all; return the refusals by txid."""
        refusals: dict[int, str] = {}
        for txid, metadata in enumerate(self._batches(), start=1):
            try:
                found = self._emitter().emit_batch(Attempt(PIPELINE, txid, 1, metadata), metadata).table.to_pylist()
            except TidegateError as error:
                refusals[txid] = str(error)
                continue
            if any(_has_nul(row) for row in found):
                refusals[txid] = "no state takes NUL"
            else:
                self._good += found
        return refusals

    def replay(self) -> None:
        columns = {name: pa.array([record[key] for record in self.waiting], pa.string()) for name, key in (KEPT.items())}
        self.waiting = []
        self._keep(self._emitter().parse_payloads(ThisProcess(pa.RecordBatch.from_pydict(columns))))

    def state(self, declared: Declared) -> "Counter[tuple]":
        return Counter(tuple(column.here(row[column.name]) for column in declared.columns) for row in self._good)

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
                assert not _has_nul(row), "such inputs are read alone"
                self._good.append(row)


def _has_nul(row: dict[str, Any]) -> bool:
    return any(isinstance(value, str) and "\0" in value for value in row.values())


def _difference(declared: Declared, inputs: list[Input], place: "_Place | _Here") -> str | None:
    """Return how state and quarantine differ from the oracle, None if they do not."""
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
    found = place.state(declared)
    if found != expected:
        return f"the state has {_shown(found - expected)}, and not {_shown(expected - found)}"
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


def _quoted(name: str) -> str:
    return "`" + re.sub("`", "``", name) + "`"
