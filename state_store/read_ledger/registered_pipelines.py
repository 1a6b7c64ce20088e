"""The registered pipelines: their declarations, and one row each for people: progress, lag, speed, pause, quarantine, phases.

Every query is bounded, however many batches the ledger has: it looks up the cursor, the newest batch and the next one, and
reads a limited number of rows around the cursor.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.base.errors import UnknownPipeline
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, spec_of
from tidegate.state_store.ledger import cursors, schema_revision, tables
from tidegate.state_store.ledger.cursors import Retired
from tidegate.state_store.read_ledger import pipeline_facts
from tidegate.state_store.read_ledger.batch_phases import Phase


@dataclass(frozen=True)
class Lag:
    """A pipeline's progress: last committed and opened txid, what it waits for, what a person may have to see to.

    `lag_seconds` is the age of its oldest opened batch that has not committed, None if there is none. `rows_per_second` are the
    source rows of its newest commits, divided by the time that these took together; None before the first commit.
    `failed_plans` have failed since one succeeded, the newest with `plan_error`. `new_columns` of the source came after the
    first batch, and no declaration has them.
    """

    pipeline: str
    committed: int
    opened: int
    pending: int
    committed_at: datetime | None
    waits_for: str | None
    quarantined: int
    paused_at: datetime | None
    paused_by: str | None
    paused_reason: str | None
    lag_seconds: float | None
    rows_per_second: float | None
    failed_plans: int
    plans_failing_since: datetime | None
    plan_error: str | None
    new_columns: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Progress(Lag):
    """How far a pipeline is, and as what it is registered.

    `phases` counts its uncommitted batches (`OpenBatches.all_phases`).
    """

    source_kind: str
    window: int
    registered_at: datetime
    declaration: Mapping[str, Any]
    phases: Mapping[Phase, int]

    @property
    def spec(self) -> PipelineSpec:
        """Return the pipeline as registered, for which its code need not be importable."""
        return spec_of(self.declaration)


def moment(connection: Connection) -> datetime:
    """Return the time of the snapshot by the server's clock."""
    return connection.execute(sa.select(sa.func.now())).scalar_one()


def pipeline_names(connection: Connection) -> list[str]:
    """Return the names of all pipelines in service, in order: those that are registered and not retired."""
    p = tables.pipeline.c
    return list(connection.scalars(sa.select(p.pipeline).where(tables.IN_SERVICE).order_by(p.pipeline)))


_LAG = [each.name for each in fields(Lag)]
_PROGRESS = [each.name for each in fields(Progress) if each.name != "phases"]


def lag(connection: Connection, pipelines: Iterable[str] | None = None) -> list[Lag]:
    """Return how far each pipeline in service is, or each of these, in the order of their names."""
    p = tables.pipeline.c
    requested = [] if pipelines is None else [p.pipeline.in_(list(pipelines))]
    rows = connection.execute(pipeline_facts.facts(_LAG).where(tables.IN_SERVICE, *requested))
    return [Lag(**row) for row in rows.mappings()]


def progress(connection: Connection, pipelines: Sequence[str]) -> list[Progress]:
    """Return how far those of these pipelines are that are in service, in the order of their names."""
    registered = pipeline_facts.of(_PROGRESS).where(tables.IN_SERVICE)
    rows = connection.execute(registered, {"pipelines": list(pipelines)}).mappings().all()
    open_batches = pipeline_facts.open_batches(connection, tables.pipeline.c.pipeline.in_(list(pipelines)))
    return [Progress(**row, phases=open_batches[row["pipeline"]].all_phases(row["pending"])) for row in rows]


def progress_of(connection: Connection, pipeline: str) -> Progress:
    """Return how far a pipeline is.

    Raises: UnknownPipeline if it is not registered, PipelineRetired.
    """
    rows = progress(connection, [pipeline])
    if not rows:
        cursors.check_not_retired(pipeline, retired(connection, pipeline))
        raise _unknown(connection, pipeline)
    return rows[0]


def retired(connection: Connection, pipeline: str) -> Retired:
    """Return when, by which operator and why a pipeline was retired, if it was."""
    row = connection.execute(sa.select(*cursors.RETIRED).where(tables.pipeline.c.pipeline == pipeline)).one_or_none()
    return Retired(*row) if row else Retired(None, None, None)


def spec_of_pipeline(connection: Connection, pipeline: str) -> PipelineSpec:
    """Return a pipeline as it was registered. The states of a retired one can be read until they are dropped.

    Raises: UnknownPipeline if it is not registered; PipelineRetired if its states were dropped.
    """
    p, retired = tables.pipeline.c, (tables.HAS_DROPPED, *cursors.RETIRED)
    row = connection.execute(sa.select(p.declaration, *retired).where(p.pipeline == pipeline)).one_or_none()
    if row is None:
        raise _unknown(connection, pipeline)
    declaration, has_dropped, *when = row
    if has_dropped:
        cursors.check_not_retired(pipeline, Retired(*when))
    return spec_of(declaration)


def check_registered(connection: Connection, pipeline: str) -> None:
    """Refuse the name of a pipeline that is not registered.

    Raises: UnknownPipeline.
    """
    if fingerprint_of(connection, pipeline) is None:
        raise _unknown(connection, pipeline)


def fingerprint_of(connection: Connection, pipeline: str) -> str | None:
    """Return the fingerprint of a pipeline's registered declaration; None if it is not registered."""
    p = tables.pipeline.c
    return connection.scalar(sa.select(p.fingerprint).where(p.pipeline == pipeline))


def _unknown(connection: Connection, pipeline: str) -> UnknownPipeline:
    schema_revision.check_ledger(connection)  # a policy on the ledger may hide the row
    return UnknownPipeline(f"Pipeline {pipeline} is not registered. If it is new, run: tidegate migrate")
