"""The ledger's tables, schema ``tidegate``, as SQLAlchemy Core metadata: what all migrations together create.

The tables of states and of staging are in `tidegate.state_store.states.state_tables`; views, functions and grants are in
``schema.sql``. What has happened to a batch is recorded in rows and times; its phase, such as processed, is derived from them
(view ``tidegate.batches``), never stored.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    Table,
    Text,
)
from sqlalchemy.dialects.postgresql import BYTEA, JSONB, OID, UUID

from tidegate.state_store.declarations.pipeline_spec import WINDOW

NAMING = {
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(referred_table_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
}
LEDGER = "tidegate"
HASH_SUM = "sum of their 64-bit hashes modulo 2^64; NULL if they are not tracked"
# No longer written. Only a later version drops the column, so that older code can still run.
OLD_HASH = "XOR of their 64-bit hashes, of attempts by code from before revision 0014"

ledger = sa.MetaData(schema=LEDGER, naming_convention=NAMING)


def _now(name: str, comment: str) -> Column[Any]:
    return Column(name, sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now(), comment=comment)


def _when(name: str, comment: str) -> Column[Any]:
    return Column(name, sa.TIMESTAMP(timezone=True), comment=comment)


pipeline = Table(
    "pipeline",
    ledger,
    Column("pipeline", Text, primary_key=True, comment="its name, as declared in jobs/pipelines"),
    Column("source_kind", Text, nullable=False),
    Column("fingerprint", Text, nullable=False, comment="SHA-256 of the declaration; attempts and commits compare it"),
    Column("declaration", JSONB, nullable=False, comment="the declaration itself"),
    Column("in_flight", Integer, nullable=False, server_default=str(WINDOW), comment="most batches begun and not committed"),
    Column(
        "commits_alone", Boolean, nullable=False, server_default=sa.false(), comment="whether each batch is merged by itself"
    ),
    _now("registered_at", "when this declaration was registered"),
    _when("paused_at", "since when no new run starts"),
    Column("paused_by", Text),
    Column("paused_reason", Text),
    _when("retired_at", "since when no batch of it counts any more"),
    Column("retired_by", Text),
    Column("retired_reason", Text),
    CheckConstraint("source_kind IN ('transactional', 'opaque', 'non-transactional')", name="source_kind"),
    CheckConstraint("num_nulls(paused_at, paused_by, paused_reason) IN (0, 3)", name="paused"),
    CheckConstraint("num_nulls(retired_at, retired_by, retired_reason) IN (0, 3)", name="retired"),
    comment="The registered pipelines.",
)

state_table = Table(
    "state_table",
    ledger,
    Column("state", Text, primary_key=True, comment="name of the table in schema state"),
    Column("pipeline", ForeignKey(pipeline.c.pipeline), nullable=False, comment="its only writer"),
    Column("pruned_txid", BigInteger, nullable=False, server_default="0", comment="of changes: those up to here were removed"),
    _when("dropped_at", "since when it is dropped, as its pipeline is retired"),
    Column("table_oid", OID, comment="its number in Postgres; NULL: not noted, or it is a view"),
    comment="Which pipeline owns which state table: one writer each.",
)

state_range = Table(
    "state_range",
    ledger,
    Column("state", ForeignKey(state_table.c.state), primary_key=True),
    Column("partition", Text, primary_key=True, comment="name of the table in schema state that has its rows"),
    Column("lower", Text, comment="its least value, of a time in UTC; NULL: it has none"),
    Column("upper", Text, comment="the least value above it; NULL: there is none, or it is the lower one of the next"),
    Column("every", Text, nullable=False, comment="its length, as it was declared; size: of changes, which have none"),
    comment="Partitions of states that are divided by ranges, and of what states record.",
)

cursor = Table(
    "cursor",
    ledger,
    Column("pipeline", ForeignKey(pipeline.c.pipeline), primary_key=True),
    Column("txid", BigInteger, nullable=False, comment="last committed txid"),
    Column("attempt", Integer, comment="its attempt; NULL before the first commit"),
    Column("source_digest", BYTEA, comment="SHA-256 of its source metadata"),
    Column(
        "epoch",
        Text,
        nullable=False,
        comment="which database incarnation: system identifier and timeline, number of the database",
    ),
    Column(
        "history",
        UUID,
        nullable=False,
        server_default=sa.func.gen_random_uuid(),
        comment="which history of commits; a new one begins when a loss is accepted",
    ),
    CheckConstraint("txid >= 0", name="txid"),
    comment="One row per pipeline. Every commit holds its row lock; order and exactly-once are decided under it.",
)

plan = Table(
    "plan",
    ledger,
    Column("pipeline", ForeignKey(pipeline.c.pipeline), primary_key=True),
    Column(
        "succeeded",
        BigInteger,
        nullable=False,
        server_default="0",
        comment="plans that have found out what is new",
    ),
    _when("succeeded_at", "when the last of them ended"),
    Column("failed", Integer, nullable=False, server_default="0", comment="plans that have failed since"),
    _when("failing_since", "when the first of these failed"),
    _when("failed_at", "when the last of these failed"),
    Column("failed_run", Text, comment="its run"),
    Column("error", Text, comment="why it failed: code and message"),
    CheckConstraint(
        "failed >= 0 AND num_nulls(failing_since, failed_at, failed_run, error) = CASE failed WHEN 0 THEN 4 ELSE 0 END",
        name="failed",
    ),
    comment="How the plans of each pipeline end: one row per pipeline.",
)

batch = Table(
    "batch",
    ledger,
    Column("pipeline", ForeignKey(pipeline.c.pipeline), primary_key=True),
    Column("txid", BigInteger, primary_key=True, autoincrement=False),
    Column("source_metadata", BYTEA, nullable=False, comment="what is needed to read exactly this batch; never edited"),
    Column("source_digest", BYTEA, nullable=False, comment="its SHA-256"),
    Column("previous_digest", BYTEA, comment="SHA-256 of the metadata that it continues; NULL for the first batch"),
    Column("opened_by", Text, nullable=False, comment="the run that planned it"),
    _now("opened_at", "when its metadata was frozen"),
    Column("attempt", Integer, nullable=False, server_default="0", comment="newest attempt: the fence"),
    _when("halted_at", "since when no task retries it"),
    Column("halted_reason", Text, comment="why, in one line"),
    Column("skip_owner", Text, comment="who gave it up: its commit will be without rows"),
    Column("skip_reason", Text),
    Column("tries_after", Integer, nullable=False, server_default="0", comment="failures up to this attempt no longer count"),
    Column("awaits_ack", Boolean, nullable=False, server_default="true", comment="its source has yet to learn that it counts"),
    _when("acked_at", "when its source learned it; NULL: not yet, or not wanted"),
    CheckConstraint("txid >= 1", name="txid"),
    CheckConstraint("(halted_at IS NULL) = (halted_reason IS NULL)", name="halted"),
    CheckConstraint("(skip_owner IS NULL) = (skip_reason IS NULL)", name="skip"),
    # Every plan looks for commits of which the source has yet to learn, however many batches there are.
    Index(None, "pipeline", "txid", postgresql_where=sa.text("awaits_ack")),
    comment="One row per txid with its frozen source metadata.",
)

attempt = Table(
    "attempt",
    ledger,
    Column("pipeline", Text, primary_key=True),
    Column("txid", BigInteger, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False, comment="numbered by the store, from 1"),
    Column("owner", Text, nullable=False, comment="who runs it, for people"),
    Column("airflow_run_id", Text, comment="NULL outside Airflow"),
    Column("airflow_task_id", Text),
    Column("airflow_try", Integer, comment="for people: it numbers nothing here"),
    Column("spark_application", Text),
    Column("spark_tag", Text, comment="tag of its operations, by which they are interrupted"),
    Column("fingerprint", Text, nullable=False, comment="declaration that computes the partials"),
    Column("source_metadata", BYTEA, comment="what it reads, if it planned an opaque batch again; NULL: the first plan"),
    Column("source_digest", BYTEA, nullable=False, comment="SHA-256 of the metadata that it reads"),
    Column("previous_digest", BYTEA, comment="SHA-256 of the metadata that this continues; NULL for the first batch"),
    _now("started_at", "when it took the fence"),
    _when("seen_at", "when the process that runs it last said that it is alive"),
    _when("staged_at", "when Spark had staged the last row"),
    _when("sealed_at", "when its staging was complete"),
    _when("failed_at", "when it gave up"),
    Column("error", Text, comment="why it gave up: code and message"),
    Column("is_poison", Boolean, comment="whether the content of the batch is at fault: only such failures count as tries"),
    Column("source_rows", BigInteger, comment="rows that the source emitted"),
    Column("source_hash", BigInteger, comment=OLD_HASH),
    Column("source_hash_sum", BigInteger, comment=HASH_SUM),
    Column("quarantined_rows", BigInteger, comment="of these, set aside as bad"),
    Column("transformed_rows", BigInteger, comment="rows that the transform returned"),
    Column("transformed_hash", BigInteger, comment=OLD_HASH),
    Column("transformed_hash_sum", BigInteger, comment=HASH_SUM),
    Column("staged_bytes", BigInteger, comment="bytes that were copied into staging"),
    _when("dropped_at", "when its staging was dropped"),
    ForeignKeyConstraint(["pipeline", "txid"], [batch.c.pipeline, batch.c.txid]),
    CheckConstraint("sealed_at IS NULL OR failed_at IS NULL", name="one_end"),
    CheckConstraint("(failed_at IS NULL) = (error IS NULL)", name="error"),
    CheckConstraint("(failed_at IS NULL) = (is_poison IS NULL)", name="is_poison"),
    # Every plan looks for staging to drop, however many attempts there are.
    Index(None, "pipeline", "txid", "attempt", postgresql_where=sa.text("dropped_at IS NULL")),
    comment="One row per try at a batch.",
)

seal = Table(
    "seal",
    ledger,
    Column("pipeline", Text, primary_key=True),
    Column("txid", BigInteger, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("state", Text, primary_key=True),
    Column("partition", Integer, primary_key=True, autoincrement=False, comment="Spark partition"),
    Column("task_attempt", BigInteger, nullable=False, comment="the one Spark task attempt whose rows count"),
    Column("rows", BigInteger, nullable=False, comment="rows it staged"),
    Column("digest", BigInteger, nullable=False, comment="XOR of the rows' 64-bit hashes, in any order"),
    ForeignKeyConstraint(["pipeline", "txid", "attempt"], [attempt.c.pipeline, attempt.c.txid, attempt.c.attempt]),
    CheckConstraint("rows > 0", name="rows"),
    comment="What a sealed attempt staged: one task attempt per partition. Partitions without rows have no row.",
)

commit = Table(
    "commit",
    ledger,
    Column("pipeline", Text, primary_key=True),
    Column("txid", BigInteger, primary_key=True, autoincrement=False),
    Column("attempt", Integer, nullable=False),
    Column("source_digest", BYTEA, nullable=False),
    Column("owner", Text, nullable=False, comment="who committed it, for people"),
    Column("key_count", BigInteger, nullable=False, comment="state rows it wrote, over all states"),
    _now("committed_at", "when its transaction began"),
    Column(
        "merged_at",
        sa.TIMESTAMP(timezone=True),
        nullable=False,
        server_default=sa.func.clock_timestamp(),
        comment="when everything was merged, just before COMMIT",
    ),
    Column("quarantined_rows", BigInteger, nullable=False, server_default="0", comment="bad records set aside with it"),
    Column("skipped_reason", Text, comment="why the batch was skipped; NULL if it was not"),
    ForeignKeyConstraint(["pipeline", "txid", "attempt"], [attempt.c.pipeline, attempt.c.txid, attempt.c.attempt]),
    comment="One row per committed txid, written in the commit's own transaction.",
)

source_file = Table(
    "source_file",
    ledger,
    Column("pipeline", Text, primary_key=True),
    Column("name", Text(collation="C"), primary_key=True, comment="below the source's folder"),
    Column("sha256", BYTEA, primary_key=True, comment="of its content: name and content are the file"),
    Column("size", BigInteger, nullable=False, comment="bytes"),
    Column("mtime_ns", BigInteger, nullable=False, comment="when it was last seen to be modified"),
    Column("txid", BigInteger, nullable=False, comment="the batch in which it counts, or was skipped"),
    ForeignKeyConstraint(["pipeline", "txid"], [batch.c.pipeline, batch.c.txid]),
    # A redo deletes the files of its batch.
    Index(None, "pipeline", "txid"),
    comment="One row per file that has counted, written in the commit of its batch.",
)

run_batch = Table(
    "run_batch",
    ledger,
    Column("pipeline", Text, primary_key=True),
    Column("run_id", Text, primary_key=True, comment="the Airflow run, or the command line's own name"),
    Column("position", Integer, primary_key=True, autoincrement=False, comment="from 0: Airflow's map index"),
    Column("txid", BigInteger, nullable=False),
    ForeignKeyConstraint(["pipeline", "txid"], [batch.c.pipeline, batch.c.txid]),
    comment="Which txids a run covers: a plan that is tried again finds its own answer.",
)

quarantine = Table(
    "quarantine",
    ledger,
    Column("pipeline", Text, primary_key=True),
    Column("txid", BigInteger, primary_key=True, autoincrement=False, comment="the batch that set it aside"),
    Column("number", BigInteger, primary_key=True, autoincrement=False, comment="from 1 within the batch"),
    Column("reason", Text, nullable=False, comment="why it is bad"),
    Column("origin", Text, comment="where it stood: file, or topic, partition and offset"),
    Column("payload", Text, nullable=False, comment="the record: as it stood, or its columns as JSON"),
    Column("is_raw", Boolean, nullable=False, comment="whether payload is the record as it stood"),
    Column("state", Text, comment="the state whose final window it came too late for, as a partial; NULL: a bad record"),
    _now("quarantined_at", "when its batch committed"),
    Column("replayed_txid", BigInteger, comment="the later batch that takes it up again; NULL while it waits here"),
    Column("mended_payload", Text, comment="what replays read in the place of payload; NULL: it was not mended"),
    _when("mended_at", "when"),
    Column("mended_by", Text, comment="the operator"),
    Column("mended_reason", Text, comment="why it was mended so"),
    ForeignKeyConstraint(["pipeline", "txid"], [batch.c.pipeline, batch.c.txid]),
    CheckConstraint("num_nulls(mended_payload, mended_at, mended_by, mended_reason) IN (0, 4)", name="mended"),
    # A replay reads the records that have its txid, `tidegate quarantine list` those that wait.
    Index(None, "pipeline", "replayed_txid", "txid", "number"),
    comment="Bad records: set aside in the commit of their batch, so that none is lost.",
)

check_result = Table(
    "check_result",
    ledger,
    Column("pipeline", Text, primary_key=True),
    Column("txid", BigInteger, primary_key=True, autoincrement=False),
    Column("name", Text, primary_key=True, comment="of the check"),
    Column("found", Text, comment="what it warned of; NULL: nothing"),
    ForeignKeyConstraint(["pipeline", "txid"], [batch.c.pipeline, batch.c.txid]),
    comment="One row per check of a committed batch.",
)

watermark = Table(
    "watermark",
    ledger,
    Column("state", Text, primary_key=True, comment="a state with windows"),
    Column("pipeline", ForeignKey(pipeline.c.pipeline), nullable=False),
    Column("txid", BigInteger, nullable=False, comment="the last batch that counted in it"),
    _when("watermark", "the greatest event time that has counted, in UTC; NULL: there was none"),
    _when("previous_watermark", "the same before that batch, for a redo"),
    _when("removed_until", "windows that ended by then are no longer kept; NULL: all are"),
    comment="How far event time has come in each state with windows.",
)


open_commit = Table(
    "open_commit",
    ledger,
    Column("pipeline", ForeignKey(pipeline.c.pipeline), primary_key=True),
    comment="Empty, but for the commits that run an author's update: a transaction that leaves a row here is refused.",
)

operator_action = Table(
    "operator_action",
    ledger,
    Column("number", BigInteger, Identity(always=True), primary_key=True),
    Column("pipeline", ForeignKey(pipeline.c.pipeline), nullable=False),
    Column("txid", BigInteger, comment="NULL: the whole pipeline"),
    Column("action", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("reason", Text, nullable=False),
    _now("acted_at", "when"),
    CheckConstraint(
        "action IN ('pause', 'resume', 'retry', 'skip', 'redo', 'replay', 'accept', 'mend', 'prune', 'retire', 'reinstate')",
        name="action",
    ),
    comment="What people did by hand, and why.",
)


def same_batch(one: sa.FromClause, other: sa.FromClause) -> sa.ColumnElement[bool]:
    """Return whether rows of two tables are of the same batch."""
    return sa.and_(one.c.pipeline == other.c.pipeline, one.c.txid == other.c.txid)


def same_attempt(one: sa.FromClause, other: sa.FromClause) -> sa.ColumnElement[bool]:
    """Return whether rows of two tables are of the same attempt at a batch."""
    return sa.and_(same_batch(one, other), one.c.attempt == other.c.attempt)
