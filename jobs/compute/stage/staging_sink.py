"""The staging sink: Spark's executors copy a state's partials, or a batch's bad records, into a staging table.

Each task streams its Arrow batches into one COPY and answers with one row: the partition, the task attempt, the number of
rows, their digest, and the count and hash sum of the transformed rows that the partials were made of. The driver sees only
these answers, at most one per partition; a task keeps SORTED_BYTES of Arrow batches at a time. Refusals (a NULL key, a lost
connection) are answers too, so that the driver raises them with their own class.
"""

import gc
import io
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import psycopg2
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv
from pyspark import TaskContext

from tidegate.jobs.compute.stage.row_tracking import HASH, ROWS, signed
from tidegate.jobs.compute.stage.unstorable_values import check_storable
from tidegate.jobs.spark.library_internals import spark_schema
from tidegate.jobs.spark.task_connections import on_executor
from tidegate.state_store.base.errors import TidegateError
from tidegate.state_store.connections.copy_into_staging import copy_partition
from tidegate.state_store.connections.postgres_errors import translate
from tidegate.state_store.declarations.pipeline_spec import Staged, staged_in_order_of

# The amount that is sorted at a time: a million keys of two sums, and their hashes.
SORTED_BYTES = 32 * 1024 * 1024
SORTED_ROWS = 10_000  # per Arrow batch after sorting, as Spark sends them
_CSV = csv.WriteOptions(include_header=False)


class TaskReport(NamedTuple):
    """A task's report to the driver: what it staged of one partition, or why it refused."""

    partition: int
    task_attempt: int
    rows: int
    digest: int
    bytes: int
    reconciled_rows: int
    reconciled_hash: int
    refusal: str | None
    reason: str | None


_ARROW_TYPES: dict[Any, pa.DataType] = {int: pa.int64(), str | None: pa.string()}
_REPORT = pa.schema([(name, _ARROW_TYPES[kind]) for name, kind in get_type_hints(TaskReport).items()])
REPORT = spark_schema(_REPORT)  # a schema in text form would cost a question to the server


@dataclass(frozen=True)
class StagingSink:
    """Stages the rows of one Spark task and yields one answer, for `DataFrame.mapInArrow`.

    `digest` is the statement that computes the digest of a task's staged rows. The columns `counter`, the number of rows that
    each partial was made of, and HASH are summed up into the answer, if present; ROWS and HASH themselves are not staged.

    It is a class, which Spark pickles by name; for an inner function, it would look through all imported modules.
    """

    conninfo: dict[str, Any]
    table: str
    staged: Staged
    digest: str
    counter: str = ROWS

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stage one partition."""
        _keep_imports()
        task = TaskContext.get()
        assert task is not None
        reader = PartialsReader(batches, self.staged, task.taskAttemptId(), self.counter)
        columns = [*(column.name for column in self.staged.columns), "task_attempt"]
        rows = checksum = 0
        refusal: TidegateError | None = None
        if not reader.is_empty:
            try:
                rows, checksum = copy_partition(
                    on_executor(self.conninfo), self.table, columns, reader, task.taskAttemptId(), self.digest
                )
            except psycopg2.Error as error:
                refusal = reader.refusal or translate(error, f"staging {self.staged.name} on {platform.node()}")
            if refusal is None and rows != reader.rows:
                refusal = TidegateError(f"COPY wrote {rows} rows of {reader.rows} into {self.table}.")
        code, reason = (type(refusal).__name__, str(refusal)) if refusal else (None, None)
        reconciled = reader.reconciled_rows, reader.reconciled_hash
        answer = TaskReport(task.partitionId(), task.taskAttemptId(), rows, checksum, reader.bytes, *reconciled, code, reason)
        yield pa.RecordBatch.from_pylist([answer._asdict()], _REPORT)


def _keep_imports() -> None:
    """Keep this worker's imports out of its garbage collections: Spark starts a collection after each task."""
    if not gc.get_freeze_count():
        gc.freeze()


def in_key_order(batches: Iterator[pa.RecordBatch], staged: Staged) -> Iterator[pa.RecordBatch]:
    """Yield the same rows sorted by their first key, within blocks of SORTED_BYTES; a text key is left unsorted.

    The merge into the state, which holds up later commits, then finds neighbouring keys side by side. The sort in a task holds
    up nothing. Sorting texts takes longer than it saves.
    """
    key = staged_in_order_of(staged)
    if key is None:
        yield from batches
        return
    gathered: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        gathered.append(batch)
        size += batch.nbytes
        if size >= SORTED_BYTES:
            yield from _sorted(gathered, key)
            gathered, size = [], 0
    if gathered:
        yield from _sorted(gathered, key)


def _sorted(batches: list[pa.RecordBatch], key: str) -> list[pa.RecordBatch]:
    rows = pa.Table.from_batches(batches).combine_chunks()
    keys = rows.column(key).chunk(0)
    # Dates and times as numbers: numpy sorts these several times as fast as Arrow does. NULLs come last, as in Postgres.
    whole, last = (pa.int32(), 2**31 - 1) if keys.type.bit_width == 32 else (pa.int64(), 2**63 - 1)
    order = np.argsort(keys.view(whole).fill_null(last).to_numpy())
    ordered: list[pa.RecordBatch] = rows.take(pa.array(order)).to_batches(max_chunksize=SORTED_ROWS)
    return ordered


class PartialsReader:
    """Arrow batches as the CSV that COPY reads: NULL is empty, every text is quoted."""

    def __init__(self, batches: Iterator[pa.RecordBatch], staged: Staged, task_attempt: int, counter: str = ROWS) -> None:
        self._batches = in_key_order((batch for batch in batches if batch.num_rows), staged)
        self._staged = staged
        self._task_attempt = task_attempt
        self._counter = counter
        self._next = next(self._batches, None)
        self._block = io.BytesIO()
        self.rows = self.bytes = self.reconciled_rows = self.reconciled_hash = 0
        # COPY turns an error of read() into one of its own, so the real reason is kept here.
        self.refusal: TidegateError | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether the partition has no rows at all."""
        return self._next is None

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes of CSV; nothing at the end.

        Raises: BadKey, Overflow for keys and values that Postgres could not store.
        """
        while not (content := self._block.read(size)):
            if self._next is None:
                return b""
            try:
                self._block = self._encode(self._next)
            except TidegateError as error:
                self.refusal = error
                raise
            self._next = next(self._batches, None)
        return content

    def _encode(self, batch: pa.RecordBatch) -> io.BytesIO:
        batch = self._reconcile(batch)
        check_storable(self._staged, batch)
        self.rows += batch.num_rows
        task_attempts = pa.repeat(pa.scalar(self._task_attempt, pa.int64()), batch.num_rows)
        block = io.BytesIO()
        csv.write_csv(_printable(batch).append_column("task_attempt", task_attempts), block, _CSV)
        self.bytes += block.tell()
        block.seek(0)
        return block

    def _reconcile(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Sum up the columns of row counts and hashes, and drop ROWS and HASH."""
        if self._counter in batch.schema.names:
            self.reconciled_rows += pc.sum(batch.column(self._counter)).as_py()
        if HASH in batch.schema.names:
            hashes = pc.fill_null(batch.column(HASH), 0).to_numpy()  # NULL: a global state of no rows
            total = int(np.add.reduce(hashes))  # modulo 2^64, too
            self.reconciled_hash = signed(self.reconciled_hash + total)
        return batch.drop_columns([name for name in (ROWS, HASH) if name in batch.schema.names])


def _printable(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with bytes in the text form that Postgres reads."""
    for number, field in enumerate(batch.schema):
        if pa.types.is_binary(field.type):
            texts = [None if value is None else f"\\x{value.hex()}" for value in batch.column(number).to_pylist()]
            batch = batch.set_column(number, field.name, pa.array(texts, pa.string()))
    return batch
