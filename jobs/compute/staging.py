"""Stage partials: on executors, each task what it has, or in process if there are few."""

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name that PySpark's users know

from jobs.compute import sink
from jobs.compute.session import LOCAL
from jobs.compute.tracking import ROWS, RowSums, signed
from state_store import StateStore, errors
from state_store.attempts import Attempt
from state_store.declaration import Staged, StateSpec
from state_store.settings import Settings
from state_store.staging import NO_TASK, StagedPartition, digest_statement
from state_store.tables import staging_table_of

# This many partials of a state, at most, are fetched and staged in process: a bound in rows, and so in memory.
FEW_ROWS = 10_000


@dataclass(frozen=True)
class StagedRows:
    """What was staged for one state, or of a batch's bad records."""

    partitions: list[StagedPartition]
    reconciled: RowSums
    bytes: int

    @property
    def rows(self) -> int:
        """How many, over all partitions."""
        return sum(partition.rows for partition in self.partitions)


class NeedsExecutors(Exception):
    """The partials of a state are more than were expected, or cannot be staged: executors stage them, or say why not."""


def stage_on_executors(settings: Settings, attempt: Attempt, spec: Staged, rows: DataFrame, counter: str = ROWS) -> StagedRows:
    """Copy rows into the attempt's staging table; the driver gets one answer per partition.

    Raises: what the executors refuse (BadKey, Overflow, StoreUnavailable, ...).
    """
    staging = staging_table_of(spec, attempt.txid, attempt.number).name
    digest = digest_statement(spec, attempt.txid, attempt.number)
    task = sink.StagingSink(conninfo_of_tasks(settings), staging, spec, digest, counter)
    # As Arrow, because collect() would ask the server how it likes its binary columns.
    table = rows.mapInArrow(task, sink.ANSWER).toArrow()
    answers = [sink.Answer(**answer) for answer in table.to_pylist()]
    for answer in answers:
        if answer.refusal:
            raise getattr(errors, answer.refusal)(answer.reason)
    partitions = [StagedPartition(spec.name, a.partition, a.task_attempt, a.rows, a.digest) for a in answers]
    reconciled = RowSums(sum(a.reconciled_rows for a in answers), signed(sum(a.reconciled_hash for a in answers)))
    return StagedRows(partitions, reconciled, sum(a.bytes for a in answers))


def stage_in_process(
    store: StateStore, attempt: Attempt, spec: StateSpec, partials: DataFrame, counter: str, *, most: int
) -> StagedRows:
    """Fetch partials and stage them from this process: at most `most`, no key longer than it may be.

    A small batch is a quarter sooner done without a Python worker beside Spark's task, and a connection of its own.

    Raises: LeftToTasks if there are more, or one of them is refused: the tasks tell why.
    """
    texts = [key.name for key in spec.keys if key.type.name in ("text", "bytea")]
    if texts:  # a longer one is not fetched as a whole; Postgres counts bytes, of which no character has less than one
        cut = {name: F.substring(name, 1, sink.MAX_KEY_BYTES + 1) for name in texts}
        partials = partials.withColumns(cut).to(partials.schema)
    table = partials.limit(most + 1).toArrow()
    if table.num_rows > most:
        raise NeedsExecutors(f"state {spec.name} has more than {most} partials")
    reader = sink.PartialsReader(iter(table.to_batches()), spec, NO_TASK, counter)
    if reader.is_empty:
        return StagedRows([], RowSums(0, 0), 0)
    try:
        partition = store.stage(attempt, spec, reader)
    except errors.TidegateError:
        if reader.refusal is None:
            raise
        raise NeedsExecutors(str(reader.refusal)) from reader.refusal
    if partition.rows != reader.rows:
        raise errors.TidegateError(f"COPY wrote {partition.rows} rows of {reader.rows} of state {spec.name}.")
    return StagedRows([partition], RowSums(reader.reconciled_rows, reader.reconciled_hash), reader.bytes)


def conninfo_of_tasks(settings: Settings) -> dict[str, Any]:
    """Return where executors connect to; the password is theirs to find, unless they are this very process."""
    conninfo = {**settings.conninfo(user=settings.pg_stager), "application_name": "tidegate staging"}
    if not LOCAL.fullmatch(settings.spark_remote):
        conninfo.pop("passfile", None)
    return conninfo
