"""Plans, reads and counts in this process, by the code of Spark's tasks; test_files.py compares it with what Spark returns."""

import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from tests.batches import stage
from tests.store import Attempt, Tracked
from tidegate.jobs import Files, State
from tidegate.jobs.engine.processing import Processor
from tidegate.jobs.sources import ORIGIN, PAYLOAD, REFUSAL, Source
from tidegate.jobs.sources.binding import coordinator_of, emitter_of
from tidegate.jobs.sources.column_types import parse_type
from tidegate.jobs.sources.data_files import DataFilesSource
from tidegate.jobs.sources.files.formats.parquet import ParquetReader
from tidegate.jobs.sources.files.formats.parquet_files.parquet_tasks import RowsReader
from tidegate.jobs.spark.task_errors import reported_in
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import MalformedRecord, TidegateError

NO_FIT = "the record does not fit the schema: "
SCHEMA = {"name": "string", "amount": "int"}


def plan(settings: Settings, source: Source, previous: Any = None, current: Any = None) -> Any:
    """Return the metadata of the batch after a batch, of a plan of its own; None if there is nothing new."""
    return coordinator_of(source, settings).initialize_transaction(1 if previous is None else 2, previous, current)


def batches(settings: Settings, source: Source, previous: Any = None) -> list[Any]:
    """Return the metadata of all batches after a batch, of a plan of its own for each."""
    found = []
    while previous := plan(settings, source, previous):
        found.append(previous)
    return found


def overwrite(path: Path, content: bytes) -> None:
    """Change only the content of a file, and no time."""
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def meanwhile(owner: Any, name: str, act: Callable[[], object]) -> AbstractContextManager[Any]:
    """Act when a function is called for the first time, before it does its work."""
    original, acts = getattr(owner, name), [act]

    def act_first(*arguments: Any, **named: Any) -> Any:
        if acts:
            acts.pop()()
        return original(*arguments, **named)

    return patch.object(owner, name, act_first)


def raises(error: type[TidegateError], act: Callable[[], object], message: str | None = None) -> str:
    """Check that exactly this error is raised, in one line that has what matches; return the line."""
    with pytest.raises(error, match=message) as refused:
        act()
    assert type(refused.value) is error
    assert "\n" not in str(refused.value)
    return str(refused.value)


def names(metadata: Any) -> list[str]:
    return [file["name"] for file in metadata.get("files") or metadata["data_files"]]


def summed(rows: Iterable[tuple]) -> dict[str, tuple[int, int]]:
    """Return lines and amount of each name by plain Python; name and amount are the last two values of a row."""
    amounts: dict[str, list[int]] = {}
    for *_, name, amount in rows:
        amounts.setdefault(name, []).append(amount)
    return {name: (len(found), sum(found)) for name, found in amounts.items()}


class Rows:
    """Rows that were read here, as a frame of Spark would have them."""

    def __init__(self, batches: Iterable[pa.RecordBatch] = ()) -> None:
        found = list(batches)
        self.table = pa.Table.from_batches(found) if found else pa.table({})

    def toArrow(self) -> pa.Table:  # noqa: N802 - a frame of Spark has it
        return self.table

    def toLocalIterator(self) -> Iterator[tuple]:  # noqa: N802 - a frame of Spark has it
        return (tuple(row.values()) for row in self.table.to_pylist())


class ThisProcess:
    """Takes the place of a Spark session, and of the frames that readers ask for: their tasks run at once, here."""

    def __init__(self, batch: pa.RecordBatch | None = None) -> None:
        self._batch = batch

    def range(self, start: int, end: int, step: int, _partitions: int) -> "ThisProcess":
        return ThisProcess(pa.RecordBatch.from_pydict({"id": pa.array(range(start, end, step), pa.int64())}))

    def select(self, *columns: str) -> "ThisProcess":
        assert self._batch is not None
        return ThisProcess(self._batch.select(list(columns)))

    def mapInArrow(self, reader: Any, _schema: Any) -> Rows:  # noqa: N802 - a frame of Spark has it
        try:
            return Rows(pickle.loads(pickle.dumps(reader))([self._batch]))
        except ValueError as error:
            raise reported_in(error) or error from None

    def createDataFrame(self, rows: Any, _schema: Any) -> Rows:  # noqa: N802 - a session of Spark has it
        return Rows(rows.to_batches() if isinstance(rows, pa.Table) else ())


class Folder:
    """The folder `inbox` of a project without servers."""

    def __init__(self, home: Path) -> None:
        self.settings = Settings(home=home, min_file_age_seconds=0)
        self.path = home / "inbox"
        self.path.mkdir()

    def write(self, name: str, content: bytes | str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def plan(self, source: Files) -> Any:
        return plan(self.settings, source)

    def read(self, source: Files, flagged: bool = False) -> list[dict[str, Any]]:
        return read(self.settings, source, self.plan(source), flagged=flagged)

    def rows(self, source: Files) -> list[tuple]:
        """Plan one batch, all of whose records are good, and return its rows, in order."""
        rows, records = self.read(source), self.read(source, flagged=True)
        without = [{name: record[name] for name in record if name not in (ORIGIN, PAYLOAD)} for record in records]
        assert without == [{**row, REFUSAL: None} for row in rows]
        return sorted((tuple(row.values()) for row in rows), key=repr)

    def refused(self, source: Files, error: type[TidegateError] = MalformedRecord) -> str:
        """Plan a batch that is refused, and return the error's line; what is wrong with a record is its flag, too."""
        message = raises(error, lambda: self.read(source))
        place, is_record, why = message.partition(f": {NO_FIT}")
        if is_record:
            bad = next(record for record in self.read(source, flagged=True) if record[REFUSAL])
            assert place == f"{self.path}/{bad[ORIGIN]}"
            assert why.startswith(bad[REFUSAL])
            (again,) = self.replayed(source, bad)
            assert again[REFUSAL], "what waits in quarantine is refused again"
        return message

    def replayed(self, source: Files, *waiting: Mapping[str, Any]) -> list[dict[str, Any]]:
        columns = {name: pa.array([record[name] for record in waiting], pa.string()) for name in (ORIGIN, PAYLOAD)}
        emitter = emitter_of(source, ThisProcess(), self.settings)  # type: ignore[arg-type]
        rows: Any = emitter.parse_payloads(ThisProcess(pa.RecordBatch.from_pydict(columns)))  # type: ignore[arg-type]
        return list(rows.table.to_pylist())


def read(settings: Settings, source: Any, metadata: Any, *, spark: Any = None, flagged: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a batch, verified; without Spark, Parquet files by the tasks that read what Spark would misread."""
    attempt, emitter = Attempt("inbox", 1, 1, metadata), emitter_of(source, spark or ThisProcess(), settings)
    if spark is None and isinstance(emitter, ParquetReader):
        types = {name: parse_type(kind).arrow for name, kind in emitter._columns.items()}
        emitter._check_files(attempt, metadata)
        tasks = emitter._tasks(zip(emitter._files, emitter._read_footers(types), strict=True))
        reader = RowsReader(tasks, types, emitter._columns, flagged)
        rows = ThisProcess().range(0, len(tasks), 1, 1).mapInArrow(reader, None).table.to_pylist()
    else:
        rows = (emitter.emit_records if flagged else emitter.emit_batch)(attempt, metadata).toArrow().to_pylist()
    emitter.verify_batch(attempt, metadata)
    assert emitter.expected_rows(metadata) == len(rows)
    return list(rows)


@dataclass
class Follower:
    """Plans and reads a table of data files, each time with all that is new; it keeps its position and the rows."""

    settings: Settings
    source: DataFilesSource
    previous: Any = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self, most: int = 100) -> list[tuple]:
        """Read the batches that can be planned, of a plan each; return all rows so far, in order."""
        while most and (found := plan(self.settings, self.source, self.previous)):
            names = re.findall(r"`((?:[^`]|``)+)` ", emitter_of(self.source, None, self.settings).row_schema())
            self.rows += [{name: row[name] for name in names} for row in read(self.settings, self.source, found)]
            self.previous = found
            most -= 1
        return sorted((tuple(row.values()) for row in self.rows), key=repr)


@dataclass
class Table:
    """A table of data files, planned and read in this process; each format has its own way to write it."""

    settings: Settings
    source: Any

    def follow(self, **source: Any) -> Follower:
        return Follower(self.settings, replace(self.source, **source))

    def plan(self, previous: Any = None, **source: Any) -> Any:
        return plan(self.settings, replace(self.source, **source), previous)


def for_this_process(settings: Settings) -> Settings:
    """Let tasks that run in this process find their password in its file."""
    return replace(settings, spark_executors="elsewhere", executor_conninfo=f"passfile='{settings.pg_passfile}'")


def stage_here(processor: Processor, attempt: Attempt) -> None:
    """Stage the counts and sums of a batch, and seal it; a transform has a twin `in_process`."""
    store, pipeline = processor._store, processor._pipeline
    emitter = emitter_of(pipeline.source, ThisProcess(), for_this_process(store.settings))  # type: ignore[arg-type]
    parts = emitter.emit_parts(attempt, attempt.source_metadata, flagged=False)
    by_name = {name: part.rows.table.to_pylist() for name, part in parts.items()}  # type: ignore[attr-defined]
    emitter.verify_batch(attempt, attempt.source_metadata)
    inputs = [row for name, part in parts.items() if part.role != "reference" for row in by_name[name]]
    assert not pipeline.spec.quarantines
    rows = pipeline.transform.in_process(by_name) if pipeline.transform else inputs  # type: ignore[attr-defined]
    states = pipeline.states.items()
    staged = [stage(store.settings, attempt, state.spec(name), _partials(state, rows)) for name, state in states]
    store.seal(attempt, staged, Tracked(len(inputs)), emitter.undeclared())


def _partials(state: Any, rows: list[dict[str, Any]]) -> Iterator[list[Any]]:
    if not isinstance(state, State):
        yield from ([place, *(row[name] for name in state.columns)] for place, row in enumerate(rows))
        return
    groups: dict[tuple, list[dict[str, Any]]] = {(): []} if not state.key else {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in state.key), []).append(row)
    for key, group in groups.items():
        columns = [part.column for part in state.parts]
        known = [[row[name] for row in group if row[name] is not None] if name else group for name in columns]
        totals: dict[str, Any] = {"count": len, "sum": sum, "min": min, "max": max}
        yield [*key, *(totals[part.function](values) for part, values in zip(state.parts, known, strict=True))]


def twin(in_process: Callable[[dict[str, list[dict[str, Any]]]], list[dict[str, Any]]]) -> Any:
    """Return a transform that runs in this process alone, and makes rows of the rows of each input and reference."""

    def transform(_rows: Any) -> Any:
        raise AssertionError

    transform.in_process = in_process  # type: ignore[attr-defined]
    return transform


@pytest.fixture
def counted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let batches be counted in this process, but for a transform that has no twin."""
    by_spark = Processor._stage

    def stage(processor: Processor, attempt: Any) -> None:
        transform = processor._pipeline.transform
        (stage_here if transform is None or hasattr(transform, "in_process") else by_spark)(processor, attempt)

    monkeypatch.setattr(Processor, "_stage", stage)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)
