"""What metrics show of every pipeline, at one moment, by a few statements whose work is bounded.

No statement takes longer as more batches commit: they read the rows of uncommitted batches, of kept staging and of the
quarantine, up to a limit, and of the past the last commits only. What tasks have done is counted by what they send
themselves (`tidegate.dags.task_metrics`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.base.errors import HoleDetected
from tidegate.state_store.connections.local_settings import set_local
from tidegate.state_store.ledger import cursors, tables
from tidegate.state_store.ledger.commit_witness import Witness
from tidegate.state_store.ledger.cursors import Cursor
from tidegate.state_store.read_ledger import pipeline_facts
from tidegate.state_store.read_ledger.batch_phases import Phase

# The statements read few rows of large tables by their keys. If Postgres expected many, it would read whole tables.
BY_KEYS = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off", "enable_material": "off"}
_AS_THEY_ARE = (
    *("opened", "committed_at", "paused_at", "quarantined", "acks_due", "planned_at", "failed_plans", "skipped_at"),
    "set_aside_at",
)
_OTHERS = ("last_commit", "lag_seconds", "staged", "short_plan_error", "new_columns")
_STAGING_TABLES = sa.text("SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'staging'::regnamespace")
_OF_CURSOR = [f"cursor_{name}" for name in Cursor._fields]


@dataclass(frozen=True)
class PipelineMeasures:
    """One pipeline: positions as txids, times as moments by the database's clock or in seconds.

    `phases`, `errors` and `tries` are those of its `OpenBatches`.
    `staged_*` are of attempts whose staging is kept. `acks_due` are committed batches of which the source has yet to learn.
    `failed_plans` counts plans that failed since one succeeded at `planned_at`; `plan_error` is the newest error's first word.
    `skipped_at` and `set_aside_at` are of the newest commit that skipped its batch, or set partials aside, of the RECENT ones.
    `is_whole` is whether the database contains all known commits.
    """

    pipeline: str
    committed: int
    opened: int
    committed_at: datetime | None
    lag_seconds: float
    paused_at: datetime | None
    quarantined: int
    staged_attempts: int
    staged_bytes: int
    acks_due: int
    planned_at: datetime | None
    failed_plans: int
    plan_error: str
    skipped_at: datetime | None
    set_aside_at: datetime | None
    is_whole: bool
    new_columns: int = 0
    tries: int = 0
    phases: Mapping[Phase, int] = field(default_factory=dict)
    errors: Mapping[tuple[Phase, str], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Measures:
    """All pipelines in service in the order of their names, and the number of tables in staging."""

    pipelines: list[PipelineMeasures]
    staging_tables: int


def measures(connection: Connection, witness: Witness) -> Measures:
    """Return the measures in the connection's snapshot, and change its settings."""
    set_local(connection, BY_KEYS)
    measured = pipeline_facts.facts([*_AS_THEY_ARE, *_OTHERS, *_OF_CURSOR])
    found = connection.execute(measured.where(tables.IN_SERVICE)).all()
    open_batches = pipeline_facts.open_batches(connection, tables.IN_SERVICE)
    epoch = cursors.current_epoch(connection)
    pipelines = []
    for row in found:
        cursor = Cursor(*row[-len(Cursor._fields) :])
        uncommitted = open_batches[cursor.pipeline]
        staged_attempts, staged_bytes = row.staged
        pipelines.append(
            PipelineMeasures(
                **{name: getattr(row, name) for name in _AS_THEY_ARE},
                pipeline=cursor.pipeline,
                committed=cursor.txid,
                lag_seconds=row.lag_seconds or 0.0,
                staged_attempts=staged_attempts,
                staged_bytes=staged_bytes,
                plan_error=(row.short_plan_error or "").partition(":")[0],
                is_whole=row.last_commit == cursor.txid
                and cursors.is_same_database(cursor, epoch, witness)
                and _has_all(connection, cursor, witness),
                new_columns=len(row.new_columns),
                tries=uncommitted.tries,
                phases=uncommitted.all_phases(row.opened - cursor.txid),
                errors=uncommitted.errors,
            )
        )
    return Measures(pipelines, connection.scalar(_STAGING_TABLES) or 0)


def _has_all(connection: Connection, cursor: Cursor, witness: Witness) -> bool:
    """Return whether the database has the last commit that the witness marked outside it; False if the mark is damaged."""
    try:
        return cursors.describe_loss(connection, cursor, witness) is None
    except HoleDetected:
        return False
