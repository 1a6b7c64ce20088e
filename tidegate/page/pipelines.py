"""Routes for pipelines: all that the user may read, and one with its states and what operators did."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from jobs.pipeline import Pipeline
from state_store import overview
from state_store.declaration import StateSpec, exactly_once
from state_store.overview import Progress
from tidegate.page import access, ledger
from tidegate.page.declared import declared
from tidegate.page.models import Action, Cause, Column, Why
from tidegate.page.waiting import causes, root_causes

router = APIRouter(prefix="/api")


class Me(BaseModel):
    """Who is logged in, and where."""

    user: str
    airflow_url: str
    version: str
    read_only: bool


class Paused(BaseModel):
    """A pause: since when, by whom, why."""

    at: datetime
    by: str
    reason: str


class PipelineRow(BaseModel):
    """A pipeline's progress, as `state_store.overview.Progress` defines it, and why it waits."""

    name: str
    description: str
    committed: int
    opened: int
    pending: int
    committed_at: datetime | None
    lag_seconds: float | None
    rows_per_second: float | None
    quarantined: int
    paused: Paused | None
    phases: dict[str, int]
    why: Cause
    may_act: bool


class Overview(BaseModel):
    """A page of pipelines, in the order of their names."""

    now: datetime
    total: int
    next: str | None
    pipelines: list[PipelineRow]


class State(BaseModel):
    """A state as it was registered."""

    name: str
    kind: str
    keys: list[Column]
    values: list[Column]


class PipelineDetail(PipelineRow):
    """One pipeline."""

    now: datetime
    source_kind: str
    guarantee: str
    window: int
    registered_at: datetime
    states: list[State]
    declared: bool
    actions: list[Action]


@router.get("/me")
def me(user: access.User) -> Me:
    """Return who is logged in."""
    from importlib.metadata import version  # noqa: PLC0415

    may_act = bool(access.allowed(user, access.ACT, _names()))
    return Me(
        user=user.get_name(), airflow_url=ledger.settings().airflow_url, version=version("tidegate"), read_only=not may_act
    )


@router.get("/pipelines")
def pipelines(
    user: access.User,
    search: Annotated[str, Query(max_length=200)] = "",
    after: Annotated[str, Query(max_length=200)] = "",
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Overview:
    """Return the pipelines that the user may read and whose name contains `search`, after a name."""
    with ledger.reader().snapshot("reading the overview") as connection:
        names = overview.pipeline_names(connection)
        mine = access.allowed(user, access.READ, (name for name in names if search.lower() in name))
        ordered = sorted(mine)
        shown = [name for name in ordered if name > after][: limit + 1]
        rows = overview.progress(connection, shown[:limit])
        whys = root_causes(connection, rows)
        now = overview.moment(connection)
    may_act = access.allowed(user, access.ACT, [row.pipeline for row in rows])
    return Overview(
        now=now,
        total=len(ordered),
        next=shown[limit - 1] if len(shown) > limit else None,
        pipelines=[_row(row, whys[row.pipeline], row.pipeline in may_act) for row in rows],
    )


@router.get("/pipelines/{pipeline}")
def pipeline_detail(pipeline: access.Readable, user: access.User) -> PipelineDetail:
    """Return one pipeline."""
    with ledger.reader().snapshot(f"reading pipeline {pipeline}") as connection:
        found = overview.progress_of(connection, pipeline)
        why = root_causes(connection, [found])[pipeline]
        actions = overview.newest_actions(connection, pipeline)
        now = overview.moment(connection)
    spec = found.spec
    is_exactly_once = all(exactly_once(spec.source_kind, state.kind) for state in spec.states)
    return PipelineDetail(
        **dict(_row(found, why, access.is_allowed(user, access.ACT, pipeline))),
        now=now,
        source_kind=found.source_kind,
        guarantee="exactly once" if is_exactly_once else "at least once",
        window=found.window,
        registered_at=found.registered_at,
        states=[_state(state) for state in spec.states],
        declared=declared(pipeline) is not None,
        actions=[Action(**action) for action in actions],
    )


@router.get("/pipelines/{pipeline}/why")
def why(pipeline: access.Readable, txid: Annotated[int | None, Query(ge=1, le=10**15)] = None) -> Why:
    """Return why the pipeline, or one of its batches, waits."""
    with ledger.reader().snapshot(f"reading why {pipeline} waits") as connection:
        return Why(causes=causes(connection, pipeline, txid))


def columns(state: StateSpec) -> tuple[list[Column], list[Column]]:
    """Return keys and values of a state."""
    keys = [Column(name=key.name, type=key.type.name) for key in state.keys]
    return keys, [Column(name=value.name, type=value.type.name) for value in state.values]


def _names() -> list[str]:
    with ledger.reader().snapshot("reading the pipelines") as connection:
        return overview.pipeline_names(connection)


def _state(state: StateSpec) -> State:
    keys, values = columns(state)
    return State(name=state.name, kind=state.kind, keys=keys, values=values)


def _row(found: Progress, why: Cause, may_act: bool) -> PipelineRow:
    code: Pipeline | None = declared(found.pipeline)
    paused = None
    if found.paused_at is not None:
        paused = Paused(at=found.paused_at, by=found.paused_by or "", reason=found.paused_reason or "")
    return PipelineRow(
        name=found.pipeline,
        description=code.description if code else "",
        committed=found.committed,
        opened=found.opened,
        pending=found.pending,
        committed_at=found.committed_at,
        lag_seconds=found.lag_seconds,
        rows_per_second=found.rows_per_second,
        quarantined=found.quarantined,
        paused=paused,
        phases=dict(found.phases),
        why=why,
        may_act=may_act,
    )
