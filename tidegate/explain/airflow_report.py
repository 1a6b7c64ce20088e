"""What Airflow says of a pipeline at which no process works: a paused Dag, an active run, a slow scheduler, a full pool."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tidegate.explain.batch_causes import Cause, cause
from tidegate.stack.components.airflow import airflow_settings, airflow_settings_of_caller
from tidegate.state_store.base.errors import TidegateError
from tidegate.state_store.base.settings import Settings

# Causes of a pipeline on which no process is at work, though a run may be on its way.
ASKED_AFTER = ("PLANNED", "FAILED", "SILENT", "STALE", "UNREAD", "WAITS_FOR_COMMIT")
BUSY_SECONDS = 20  # since the scheduler's last heartbeat: it sends one in each loop, some seconds apart
CAPACITY = "AIRFLOW__TRIGGERER__DEFAULT_CAPACITY"


@dataclass(frozen=True)
class Facts:
    """What Airflow says: the pipeline's active run; its processes; tasks that wait in triggerers.

    `failed_plan` is the newest run, if none is active and its plan failed. `pools` are those in which tasks of the run wait
    for a slot, None where Airflow has no such pool. `paused_page` is the Dag's page if the Dag is paused.
    """

    run: Mapping[str, Any] | None
    failed_plan: Mapping[str, Any] | None
    paused_page: str | None
    scheduler_silent_seconds: float | None
    triggerer: str | None
    pools: Mapping[str, Mapping[str, Any] | None]
    deferred: int
    capacity: int


def causes(settings: Settings, pipeline: str, planned_at: datetime | None) -> list[Cause]:
    """Ask Airflow; return what keeps a run of this pipeline from going on, the root last; [] if nothing does, without a run.

    A plan of the pipeline has last succeeded at `planned_at`: a run that failed before then says nothing of the next one.
    """
    from tidegate.airflow_client import AirflowClient  # noqa: PLC0415 - imports httpx

    try:
        with closing(AirflowClient(settings)) as airflow:
            return list(causes_of(pipeline, Facts(**airflow.facts(pipeline), capacity=_capacity()), planned_at))
    except TidegateError as error:
        story = f"Airflow cannot be asked whether a run is on its way: {str(error).rstrip('.')}."
        return [cause("AIRFLOW_UNKNOWN", story, severity="warning", error=error.code)]


def causes_of(pipeline: str, facts: Facts, planned_at: datetime | None) -> Iterator[Cause]:
    """Yield the causes that follow from the facts, the nearest first."""
    if facts.paused_page is not None:
        waits = f": its run {facts.run['dag_run_id']} starts no task" if facts.run else ", so no run of it begins"
        story = f"Dag {pipeline} is paused in Airflow{waits}."
        yield cause("DAG_PAUSED", story, severity="warning", advice=f"Unpause it in Airflow: {facts.paused_page}")
        return
    if facts.run is None:
        failed = facts.failed_plan
        if failed and (planned_at is None or datetime.fromisoformat(failed["end_date"]) > planned_at):
            yield cause(
                "RUN_REFUSED",
                f"Airflow's newest run {failed['dag_run_id']} of {pipeline} failed in its plan.",
                since=datetime.fromisoformat(failed["end_date"]),
                severity="warning",
                advice="Read the log of its plan, correct what that names, such as a run parameter, and start another run.",
            )
        return
    story = f"Airflow's run {facts.run['dag_run_id']} of {pipeline} is {facts.run['state']}, and goes on by itself."
    yield cause("RUN_ACTIVE", story, advice="Nothing, unless something below keeps it from going on.")
    known: dict[str, Any] = {"severity": "warning", "command": "tidegate status"}
    if (silent := facts.scheduler_silent_seconds) is None or silent > BUSY_SECONDS:
        heard = "not been heard" if silent is None else f"last been heard {silent:.0f} s ago"
        story = f"Airflow's scheduler has {heard}: it is busy or dead, and starts no task meanwhile."
        advice = "If it stays so, look at its log; fewer task instances per run (batches_per_run) make its loops short."
        yield cause("SCHEDULER_SLOW", story, advice=advice, **known)
    if facts.triggerer != "healthy":
        story = f"Airflow's triggerer is {facts.triggerer or 'not there'}, and tasks that wait in it stay there."
        yield cause("TRIGGERER_AWAY", story, advice="Start it (tidegate up), or look at its log.", **known)
    elif facts.deferred >= facts.capacity:
        story = f"{facts.deferred} tasks wait in Airflow's triggerer, which has room for {facts.capacity}: the others rest."
        yield cause("TRIGGERER_FULL", story, advice=f"Raise {CAPACITY}, or start another triggerer.", **known)
    yield from _of_pools(facts, known)


def _of_pools(facts: Facts, known: Mapping[str, Any]) -> Iterator[Cause]:
    for name, pool in sorted(facts.pools.items()):
        if pool is None:
            story = f"Airflow has no pool {name}, in which tasks of this run are to be: it never starts them."
            yield cause("POOL_MISSING", story, advice="Make it in Airflow (Admin, Pools), or change pool= of the Dag.", **known)
        elif pool["slots"] >= 0 and pool["open_slots"] <= 0:
            story = f"No slot of Airflow's pool {name} is free: all {pool['slots']} are taken, and tasks wait for one."
            advice = "Wait until tasks of other Dags end, or give the pool more slots."
            if pool["slots"] == 0:
                story, advice = f"Airflow's pool {name} has no slots, and tasks wait for one.", "Give it some (Admin, Pools)."
            elif pool["include_deferred"]:
                story += " Tasks that wait in the triggerer take slots of it, too."
                advice = "Let deferred tasks take none (Admin, Pools, Include Deferred): some wait for those that get no slot."
            yield cause("POOL_FULL", story, advice=advice, **known)


def _capacity() -> int:
    return int({**airflow_settings(), **airflow_settings_of_caller()}[CAPACITY])
