"""A source that follows a state of another pipeline: its changes, or its appended rows, in the order of their txids.

    metadata = {"after": [txid] or null, "to": [txid], "splits": [[txid], ...], "rows": how many, "commit": that of `to`,
                "columns": those of the state when the batch was planned}

A batch is what a range of the other pipeline's txids has changed. These have committed, so nothing is added to the range later,
and both pipelines together are exactly once from end to end. A column that the state gets later is read, too, also by a batch
that was planned before: it is NULL there, and no part of what replays have in common.
"""

from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg2
from psycopg2 import sql

from tidegate.jobs.sources import Coordinator, Dataset, Emitter, Source
from tidegate.jobs.sources.column_types import parse_type
from tidegate.jobs.sources.postgres.table_query import TableQuery
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable, UsageError
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.connections import lock_holders
from tidegate.state_store.connections.executor_connections import connect
from tidegate.state_store.connections.postgres_errors import translate
from tidegate.state_store.declarations.column_spec import ColumnType
from tidegate.state_store.declarations.pipeline_spec import (
    SourceKind,
    SourceMetadata,
    StateSpec,
    check_of,
    followed_as,
    taken_over,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidegate.state_store import StateStore
    from tidegate.state_store.attempt.attempts import Attempt
    from tidegate.state_store.declarations.pipeline_spec import PipelineSpec

_SPARK_NAMES = {"text": "string", "integer": "int", "timestamptz": "timestamp", "timestamp": "timestamp_ntz", "bytea": "binary"}
_UPSTREAM = """
SELECT c.txid, p.declaration, coalesce((
    SELECT max(s.pruned_txid) FROM tidegate.state_table s
    WHERE s.pipeline = c.pipeline AND s.state IN (%(state)s, %(state)s || '_changes', %(state)s || '_final')
), 0) FROM tidegate.cursor c JOIN tidegate.pipeline p USING (pipeline) WHERE c.pipeline = %(pipeline)s
"""
# The identity of a commit, and when a rebuild last took the place of what it wrote: after a restore has lost it, a new commit
# of the same txid has another one.
_COMMIT = """
SELECT concat_ws(' ', attempt, committed_at AT TIME ZONE 'UTC', (
    SELECT max(retired_at) AT TIME ZONE 'UTC' FROM tidegate.pipeline WHERE retired_by = %s AND retired_reason = %s
)) FROM tidegate.commit WHERE pipeline = %s AND txid = %s
"""
_COUNTS = "SELECT txid, count(*) FROM {table} WHERE txid > %s AND txid <= %s GROUP BY txid ORDER BY txid"


@dataclass(frozen=True)
class Changes(Source):
    """What another pipeline's state becomes, each change once and in txid order: ``Changes("flights.daily")``.

    The rows have the state's key and values, the `txid` that changed them and, if the state records changes (`State.changes`),
    ``previous_<value>`` and `previous_txid`, which are NULL for a new key. A state of appended rows (`Rows`) is followed by its
    rows. An array is a string, as Postgres writes it.

    A batch covers at most `max_txids` of the other pipeline's txids, and more than `max_rows` rows only if a single txid has
    more; it is read over at most `partitions` connections. A txid without changes gives no rows.
    """

    of: str
    max_txids: int = 100
    max_rows: int = 1_000_000
    partitions: int = 4
    kind: SourceKind = field(default="transactional", init=False)

    def __post_init__(self) -> None:
        """Check the names and numbers.

        Raises: ValueError.
        """
        check_of(self.of)
        if min(self.max_txids, self.max_rows, self.partitions) < 1:
            raise ValueError(f"Changes({self.of!r}) needs max_txids, max_rows and partitions of at least 1.")

    @property
    def pipeline(self) -> str:
        """The name of the pipeline that is followed."""
        return self.of.partition(".")[0]

    @property
    def state(self) -> str:
        """The name of its state."""
        return self.of.partition(".")[2]

    @property
    def follows(self) -> str:
        """Return the name of the pipeline that is followed."""
        return self.pipeline

    @property
    def identity(self) -> str:
        """Return whose changes these are."""
        return followed_as(self.pipeline, self.state)

    def coordinator(self, settings: Settings) -> "ChangesCoordinator":
        """Return a coordinator that plans ranges of committed txids."""
        return ChangesCoordinator(self, settings)

    def emitter(self, spark: "SparkSession", settings: Settings) -> "ChangesEmitter":
        """Return a reader of the range that the metadata names."""
        return ChangesEmitter(self, spark, settings)

    def has_rows(self, metadata: SourceMetadata) -> bool:
        """Return whether the batch has rows; txids without changes only move the position."""
        return bool(metadata["rows"])

    def datasets(self, metadata: SourceMetadata, settings: Settings) -> list[Dataset]:
        """Return the table of the state."""
        del metadata
        place = settings.conninfo()
        return [Dataset(f"postgres://{place['host']}:{place['port']}", f"{place['dbname']}.state.{self.state}")]


@dataclass(frozen=True)
class _Upstream:
    """The followed pipeline at one time: its last committed txid, and the query of its changes."""

    committed: int
    query: TableQuery
    pruned: int  # the txid up to which changes were removed


class ChangesCoordinator(Coordinator):
    """Plans ranges of txids that had committed when the plan first looked at the followed pipeline."""

    def __init__(self, source: Changes, settings: Settings) -> None:
        self._source = source
        self._settings = settings
        self._upstream: _Upstream | None = None
        self.until: int | None = None  # the followed pipeline's txid that a range may not pass

    def initialize_transaction(
        self,
        txid: int,  # noqa: ARG002 - ranges follow each other by the other pipeline's txids alone
        previous_metadata: SourceMetadata | None,
        current_metadata: SourceMetadata | None,
    ) -> SourceMetadata | None:
        """Return the next range of the other pipeline's txids, None if it has not committed any since.

        Raises: SourceUnreadable, SourceChanged, StoreUnavailable.
        """
        if current_metadata is not None:
            return current_metadata
        source = self._source
        with _connected(self._settings, self._settings.pg_user, source) as connection:
            self._upstream = self._upstream or _find_upstream(connection, source)
            upstream = self._upstream
            if previous_metadata is not None:
                _check_history(connection, source, previous_metadata)
            after = int(previous_metadata["to"][0]) if previous_metadata else 0
            _check_kept(source, after, upstream)
            last = min(upstream.committed, after + source.max_txids, self.until or upstream.committed)
            if after >= last:
                return None
            with connection.cursor() as cursor:
                cursor.execute(sql.SQL(_COUNTS).format(table=upstream.query.relation), [after, last])
                counts: list[tuple[int, int]] = cursor.fetchall()
            to, rows, splits = _divide(counts, last, source)
            begin = [str(after)] if after else None
            commit = _commit(connection, source, to)
            # A partition that is removed meanwhile is gone also from this snapshot, with rows that were to be counted.
            connection.rollback()
            _check_kept(source, after, _find_upstream(connection, source))
            columns = list(upstream.query.columns)
            return {"after": begin, "to": [str(to)], "splits": splits, "rows": rows, "commit": commit, "columns": columns}


class ChangesEmitter(Emitter):
    """Reads the range that the metadata names, with one connection per part."""

    def __init__(self, source: Changes, spark: "SparkSession", settings: Settings) -> None:
        self._source = source
        self._spark = spark
        self._settings = settings

    def emit_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":  # noqa: ARG002
        """Return the rows of the range; each part is read when Spark requests it."""
        from tidegate.jobs.sources.postgres.read import PartsReader, parts_of  # noqa: PLC0415
        from tidegate.jobs.spark.task_connections import conninfo_of_tasks  # noqa: PLC0415 - declaring a pipeline must not load pyspark

        query = self._find_upstream(metadata).query
        parts = parts_of(metadata)
        numbers = self._spark.range(0, len(parts), 1, len(parts))
        return numbers.mapInArrow(PartsReader(conninfo_of_tasks(self._settings), query, parts), query.row_schema)

    def row_schema(self) -> str:
        """Return the columns of the state's changes."""
        with _connected(self._settings, self._settings.pg_user, self._source) as connection:
            return _find_upstream(connection, self._source).query.row_schema

    def expected_rows(self, metadata: SourceMetadata) -> int:
        """Return the planned number of rows."""
        rows: int = metadata["rows"]
        return rows

    def replayed_columns(self, metadata: SourceMetadata) -> Collection[str] | None:
        """Return the columns that the state had when the batch was planned."""
        columns: list[str] | None = metadata.get("columns")  # there may be no batch before
        return columns

    def verify_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> None:  # noqa: ARG002
        """Check that the range still has its planned rows.

        Raises: SourceChanged.
        """
        query = self._find_upstream(metadata).query
        with _connected(self._settings, self._settings.pg_user, self._source) as connection, connection.cursor() as cursor:
            condition = query.between(metadata["after"], metadata["to"])
            cursor.execute(sql.SQL("SELECT count(*) FROM {} WHERE {}").format(query.relation, condition))
            (rows,) = cursor.fetchone()
        if rows != metadata["rows"]:
            first = int(metadata["after"][0]) + 1 if metadata["after"] else 1
            raise SourceChanged(
                f"{query.name} has {rows} row(s) in txids {first} to {metadata['to'][0]}, but {metadata['rows']} when the "
                "batch was planned. Rows of a committed txid never change: restore the table."
            )

    def _find_upstream(self, metadata: SourceMetadata) -> _Upstream:
        with _connected(self._settings, self._settings.pg_user, self._source) as connection:
            _check_history(connection, self._source, metadata)
            upstream = _find_upstream(connection, self._source)
        _check_kept(self._source, int(metadata["after"][0]) if metadata["after"] else 0, upstream)
        return upstream


def _find_upstream(connection: Any, source: Changes) -> _Upstream:
    """Look up the followed pipeline in the ledger.

    Raises: SourceUnreadable if there is no such state, or it cannot be followed; SourceChanged if its table is another one;
    SchemaOutOfDate if it lacks a partition, whose rows would be passed.
    """
    from tidegate.state_store.declarations.pipeline_spec import spec_of  # noqa: PLC0415
    from tidegate.state_store.states import key_lookup  # noqa: PLC0415 - declaring a pipeline must not load SQLAlchemy

    with connection.cursor() as cursor:
        cursor.execute(_UPSTREAM, {"state": source.state, "pipeline": source.pipeline})
        row = cursor.fetchone()
    if row is None:
        raise SourceUnreadable(
            f"Changes({source.of!r}): pipeline {source.pipeline} is not registered. Declare it, then run: tidegate migrate"
        )
    committed, declaration, pruned = row
    state = spec_of(declaration).state(source.state)
    if state is None or state.stream is None:
        reason = "has no such state" if state is None else "does not record changes of it: declare the state with changes=True"
        raise SourceUnreadable(f"Changes({source.of!r}): pipeline {source.pipeline} {reason}.")
    table = state.stream[0]
    if committed and not key_lookup.is_same_table(connection, table):
        raise SourceChanged(
            f"Changes({source.of!r}): table state.{table} is gone, or was put back by itself, so rows of committed txids may "
            f"be missing; {source.pipeline} does not go on either. See what it says: tidegate run {source.pipeline}"
        )
    key_lookup.check_whole(connection, table)
    return _Upstream(committed, _query(source, state), pruned)


def _query(source: Changes, state: StateSpec) -> TableQuery:
    assert state.stream is not None
    table, columns = state.stream
    kinds = {column.name: parse_type(_spark_name(column.type)) for column in columns}
    return TableQuery(f"The changes of {source.of}", ("state", table), "", ("txid",), kinds)


def _spark_name(kind: ColumnType) -> str:
    if numeric := kind.precision_and_scale:
        return f"decimal({numeric[0]},{numeric[1]})"
    return "string" if kind.element or kind.name == "uuid" else _SPARK_NAMES.get(kind.name, kind.name)


def _divide(counts: list[tuple[int, int]], last: int, source: Changes) -> tuple[int, int, list[list[str]]]:
    """Return the end of a range, its number of rows, and where to divide it into parts of about the same size."""
    rows, to, ends = 0, last, []
    for txid, count in counts:
        if rows and rows + count > source.max_rows:
            to = txid - 1
            break
        rows += count
        ends.append((txid, rows))
    share = max(1, rows // source.partitions)
    splits: list[list[str]] = []
    goal = share
    for txid, so_far in ends[:-1]:
        if so_far >= goal and len(splits) < source.partitions - 1:
            splits.append([str(txid)])
            goal = so_far + share
    return to, rows, splits


def _commit(connection: Any, source: Changes, txid: int) -> str | None:
    with connection.cursor() as cursor:
        cursor.execute(_COMMIT, [*taken_over(source.pipeline), source.pipeline, txid])
        row = cursor.fetchone()
    return row[0] if row else None


def _is_range(metadata: SourceMetadata) -> bool:
    """Return whether metadata are those of `Changes`: a table of Delta has commits, too, and a PostgresTable has ranges."""
    return {"to", "commit"} <= metadata.keys()


def _check_history(connection: Any, source: Changes, metadata: SourceMetadata) -> None:
    """Refuse a range if the followed pipeline's last commit in it was lost, or made again, or if it is no range of commits."""
    if not _is_range(metadata):
        raise SourceChanged(
            f"Changes({source.of!r}): the batches before are of another source, so nothing is known of where this one stands. "
            "Give the pipeline and its states new names, or declare the earlier source again."
        )
    to = int(metadata["to"][0])
    if _commit(connection, source, to) != metadata["commit"]:
        raise SourceChanged(
            f"Changes({source.of!r}): pipeline {source.pipeline} has lost its commit of txid {to}, which was followed, or has "
            "made it again: its database was restored without this one, the txid was redone without this pipeline (tidegate "
            "redo --without), or its states were rebuilt. Restore both from the same backup; or begin again with a new "
            "pipeline and states."
        )


def _check_kept(source: Changes, after: int, upstream: _Upstream) -> None:
    """Refuse to follow changes if some of those that come next were removed."""
    if after < upstream.pruned:
        raise SourceChanged(
            f"Changes({source.of!r}): the changes after txid {after} are needed, but some up to txid {upstream.pruned} were "
            f"removed (tidegate prune). A pipeline that begins later has to take the state as it is: read it with StateReader."
        )


def removable(
    store: "StateStore", spec: "PipelineSpec", state: StateSpec, keep: int, *, without: Collection[str] = ()
) -> tuple[int, dict[str, int]]:
    """Return the txid up to which changes may be removed so that `keep` txids stay, and, by follower, the same for it alone.

    A follower, a pipeline that reads the changes, needs the range of its last committed batch, which a redo would read again,
    and all later txids. A batch of quarantined records carries along the range before it. Followers named in `without` are not
    considered; they are refused if they are run again.

    Raises: UsageError if one of these is no follower.
    """
    from tidegate.state_store.ledger.batches import position_of  # noqa: PLC0415 - declaring a pipeline must not load SQLAlchemy

    needed: dict[str, int] = {}
    followers = store.followers(spec.name, state.name)
    if unknown := sorted(set(without) - {follower.pipeline for follower in followers}):
        raise UsageError(f"Pipeline {unknown[0]} does not follow {spec.name}.{state.name}, so nothing is kept for it.")
    for follower in (follower for follower in followers if follower.pipeline not in without):
        metadata = store.source_metadata(follower.pipeline, follower.committed) if follower.committed else {}
        metadata = position_of(metadata) or {}
        if follower.input:  # one of several inputs, perhaps without a share of this batch
            idle = metadata.get("idle", {}).get(follower.input, {})
            metadata = metadata.get("inputs", {}).get(follower.input, {**idle, "after": idle.get("to")})
        after = int(metadata["after"][0]) if _is_range(metadata) and metadata["after"] else 0
        needed[follower.pipeline] = min(after, needed.get(follower.pipeline, after))
    return max(0, min([store.committed(spec.name) - keep, *needed.values()])), needed


@contextmanager
def _connected(settings: Settings, user: str, source: Changes) -> Iterator[Any]:
    try:
        with closing(connect({**settings.conninfo(user=user), "application_name": "tidegate follow"})) as connection:
            connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL row_security = off")  # a policy that hides rows is an error
            try:
                yield connection
            except psycopg2.Error as error:
                connection.rollback()
                raise translate(error, f"following {source.of}", lock_holders.of(error, connection)) from error
    except psycopg2.Error as error:
        raise translate(error, f"following {source.of}") from error
