"""Stage partials: on Spark's executors, where each task copies its partition, or in this process if there are few."""

from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tidegate.jobs.compute.stage import staging_sink
from tidegate.jobs.compute.stage.row_tracking import ROWS, RowSums, signed
from tidegate.jobs.compute.stage.unstorable_values import MAX_KEY_BYTES
from tidegate.jobs.spark.task_connections import conninfo_of_tasks
from tidegate.state_store import StateStore
from tidegate.state_store.attempt.attempts import NO_TASK, Attempt, StagedPartition
from tidegate.state_store.attempt.staging_tables import digest_statement
from tidegate.state_store.base import errors
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import Staged, StateSpec
from tidegate.state_store.states.state_tables import staging_table_of

# At most this number of partials of a state is fetched and staged in process: a bound in rows, and so in memory.
FEW_ROWS = 10_000


@dataclass(frozen=True)
class StagedRows:
    """What was staged for one state, or of a batch's bad records; `reconciled` sums up the rows that the partials came from."""

    partitions: list[StagedPartition]
    reconciled: RowSums
    bytes: int

    @property
    def rows(self) -> int:
        """The number of rows over all partitions."""
        return sum(partition.rows for partition in self.partitions)


class NeedsExecutors(Exception):
    """A state has more partials than expected, or some that cannot be staged: executors stage them, or raise the error."""


def stage_on_executors(settings: Settings, attempt: Attempt, spec: Staged, rows: DataFrame, counter: str = ROWS) -> StagedRows:
    """Copy rows into the attempt's staging table by Spark's tasks, which answer once per partition.

    Raises: the executors' refusals (BadKey, Overflow, StoreUnavailable, ...).
    """
    staging = str(staging_table_of(spec, attempt.txid, attempt.number).name)  # plain text, because executors lack SQLAlchemy
    digest = digest_statement(spec, attempt.txid, attempt.number)
    # Executors may lack the author's modules, so the author's code is left out.
    plain_spec = spec.without_code if isinstance(spec, StateSpec) else spec
    task = staging_sink.StagingSink(conninfo_of_tasks(settings), staging, plain_spec, digest, counter)
    # As Arrow, because collect() would ask the server how to return binary columns.
    table = rows.mapInArrow(task, staging_sink.REPORT).toArrow()
    answers = [staging_sink.TaskReport(**answer) for answer in table.to_pylist()]
    for answer in answers:
        if answer.refusal:
            raise getattr(errors, answer.refusal)(answer.reason)
    partitions = [StagedPartition(spec.name, a.partition, a.task_attempt, a.rows, a.digest) for a in answers]
    reconciled = RowSums(sum(a.reconciled_rows for a in answers), signed(sum(a.reconciled_hash for a in answers)))
    return StagedRows(partitions, reconciled, sum(a.bytes for a in answers))


def stage_in_process(
    store: StateStore, attempt: Attempt, spec: StateSpec, partials: DataFrame, counter: str, *, most: int
) -> StagedRows:
    """Fetch partials and stage them from this process: at most `most`, and no key longer than its limit.

    A small batch is faster without a Python worker beside Spark's task, and without a further connection to Postgres.

    Raises: NeedsExecutors if there are more, or one is refused: executors then raise the error; StoreUnavailable.
    """
    texts = [key.name for key in spec.keys if key.type.name in ("text", "bytea")]
    if texts:  # a key that is too long is not fetched whole; the limit is in bytes, and a character has at least one
        shortened = {name: F.substring(name, 1, MAX_KEY_BYTES + 1) for name in texts}
        partials = partials.withColumns(shortened).to(partials.schema)
    table = partials.limit(most + 1).toArrow()
    if table.num_rows > most:
        raise NeedsExecutors(f"state {spec.name} has more than {most} partials")
    reader = staging_sink.PartialsReader(iter(table.to_batches()), spec, NO_TASK, counter)
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
