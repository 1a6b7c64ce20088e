"""Routes for pipelines: all that the user may read, and one with its states and what operators did."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from tidegate.explain.why import Cause, explain, root_causes, root_of
from tidegate.jobs.pipeline import Pipeline
from tidegate.page import access, ledger_connection
from tidegate.page.declared_pipelines import declared
from tidegate.page.shared_models import Action, Column, columns_of
from tidegate.state_store.declarations.pipeline_spec import StateSpec, exactly_once
from tidegate.state_store.read_ledger import batch_status, registered_pipelines, wait_facts
from tidegate.state_store.read_ledger.batch_phases import Phase
from tidegate.state_store.read_ledger.registered_pipelines import Progress

router = APIRouter(prefix="/api")
_TROUBLE = {"error": 0, "warning": 1, "info": 3, "ok": 4}
_PAUSED = 2  # by a person's wish: after those that need one


class Me(BaseModel):
    """Who is logged in, and to which version."""

    user: str
    version: str


class Paused(BaseModel):
    """A pause: since when, by whom, why."""

    at: datetime
    by: str
    reason: str


class PipelineRow(BaseModel):
    """A pipeline's progress (`tidegate.state_store.read_ledger.registered_pipelines.Progress`), and why it waits."""

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
    phases: dict[Phase, int]
    why: Cause
    may_act: bool


class Pipelines(BaseModel):
    """Some of `total` pipelines, those with most trouble first."""

    now: datetime
    total: int
    pipelines: list[PipelineRow]


class State(BaseModel):
    """A state as it was registered."""

    name: str
    kind: str
    keys: list[Column]
    values: list[Column]


class PipelineDetail(PipelineRow):
    """One pipeline; `causes` lead from the nearest to the root, which is `why`."""

    now: datetime
    causes: list[Cause]
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

    return Me(user=user.get_name(), version=version("tidegate"))


@router.get("/pipelines")
def pipelines(
    user: access.User, search: Annotated[str, Query(max_length=200)] = "", limit: Annotated[int, Query(ge=1, le=200)] = 50
) -> Pipelines:
    """Return the pipelines that the user may read and whose name contains `search`, those with most trouble first.

    All of them are looked at: those that are left out have no more trouble than those that are returned.
    """
    mine = sorted(access.allowed(user, access.READ, (name for name in _names() if search.lower() in name)))
    with wait_facts.moment(ledger_connection.reader(), "reading the overview", mine) as moment:
        whys = root_causes(moment, mine)
        shown = sorted(whys, key=lambda name: (_trouble(whys[name]), name))[:limit]
        found = {row.pipeline: row for row in registered_pipelines.progress(moment.connection, shown)}
        now = registered_pipelines.moment(moment.connection)
    may_act = access.allowed(user, access.ACT, shown)
    rows = [_row(found[name], whys[name], name in may_act) for name in shown if name in found]
    rows.sort(key=lambda row: (_trouble(row.why), -(row.lag_seconds or 0), row.name))
    return Pipelines(now=now, total=len(mine), pipelines=rows)


@router.get("/pipelines/{pipeline}")
def pipeline_detail(pipeline: access.Readable, user: access.User) -> PipelineDetail:
    """Return one pipeline."""
    with wait_facts.moment(ledger_connection.reader(), f"reading pipeline {pipeline}", [pipeline]) as moment:
        found = registered_pipelines.progress_of(moment.connection, pipeline)
        causes = explain(moment, pipeline).causes
        actions = batch_status.newest_actions(moment.connection, pipeline)
        now = registered_pipelines.moment(moment.connection)
    spec = found.spec
    is_exactly_once = all(exactly_once(spec.source_kind, state.kind) for state in spec.states)
    return PipelineDetail(
        **vars(found) | vars(_row(found, root_of(causes), access.is_allowed(user, access.ACT, pipeline))),
        now=now,
        causes=list(causes),
        guarantee="exactly once" if is_exactly_once else "at least once",
        states=[_state(state) for state in spec.readable],
        declared=declared(pipeline) is not None,
        actions=[Action(**action) for action in actions],
    )


def _names() -> list[str]:
    with ledger_connection.reader().snapshot("reading the pipelines") as connection:
        return registered_pipelines.pipeline_names(connection)


def _trouble(why: Cause) -> int:
    return _PAUSED if why.code == "PAUSED" else _TROUBLE[why.severity]


def _state(state: StateSpec) -> State:
    return State(name=state.name, kind=state.kind, keys=columns_of(state.row_key), values=columns_of(state.results))


def _row(found: Progress, why: Cause, may_act: bool) -> PipelineRow:
    code: Pipeline | None = declared(found.pipeline)
    paused = None
    if found.paused_at is not None:
        paused = Paused(at=found.paused_at, by=found.paused_by or "", reason=found.paused_reason or "")
    description = code.description if code else ""
    return PipelineRow(
        **vars(found), name=found.pipeline, description=description, paused=paused, why=why, may_act=may_act
    )  # the model takes what it shows
