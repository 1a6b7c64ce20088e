"""The verbs that take a pipeline out of service, and back: retire, reinstate."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from tidegate import output
from tidegate.commands import as_json, connected, pipeline_name, yes
from tidegate.commands.act.operator_name import operator
from tidegate.commands.act.operator_verbs import reason, reason_if_any
from tidegate.explain import remedies
from tidegate.jobs.registry import has_pipeline, named_rebuild
from tidegate.operator_actions import require_reason
from tidegate.state_store.base.errors import UsageError

if TYPE_CHECKING:
    from tidegate.state_store import StateStore
    from tidegate.state_store.pipeline_changes.retirement import Request, Retirement


_SHOWN = ("committed", "uncommitted", "quarantined", "acks_due", "states", "dropped", "mentioned_by")


@click.command()
@pipeline_name
@click.option("--drop-states", is_flag=True, help="Drop its states too, permanently; otherwise their tables stay for readers.")
@reason
@yes
@as_json
def retire(pipeline: str, drop_states: bool, reason: str, yes: bool, as_json: bool) -> None:
    """Take a pipeline out of service: no batch of it counts any more, and nothing shows or waits for it.

    Its ledger, its name and those of its states stay; `reinstate` lets it go on where it stood. Its code may be gone.
    """
    from tidegate.state_store.pipeline_changes.retirement import Request  # noqa: PLC0415 - loads SQLAlchemy

    why = require_reason(reason, "replaced by flights_by_hour")
    request = Request(operator("retire"), why, drops_states=drop_states, is_confirmed=yes)
    with connected(as_owner=True) as store:
        done = _retired(store, pipeline, request)
    if not yes and (not done.already or done.dropped):
        raise UsageError(f"{_outlook(pipeline, done, drops=drop_states)} Add --yes to do it.")
    with connected() as store:
        staged = sum(iter(lambda: store.drop_staging_of_retired(pipeline), 0))
    output.report(_report(pipeline, done), _facts(pipeline, done, staged), as_json)


@click.command()
@pipeline_name
@reason_if_any
@as_json
def reinstate(pipeline: str, reason: str, as_json: bool) -> None:
    """Let a retired pipeline go on where it stood, as long as its states were not dropped."""
    why = require_reason(reason)
    with connected(as_owner=True) as store:
        changed = store.reinstate(pipeline, operator("reinstate"), why)
    start = remedies.run_of(pipeline, store.settings)
    again = f"{pipeline} is in service again. After tidegate migrate, start a run: {start}"
    facts = {"pipeline": pipeline, "retired": False, "already": not changed}
    output.report(again if changed else f"{pipeline} was not retired.", facts, as_json)


def _retired(store: "StateStore", pipeline: str, request: "Request") -> "Retirement":
    """Retire a pipeline, by as many transactions as its states take; return the last outcome, with all that was dropped."""
    dropped: list[str] = []
    first: Retirement | None = None
    while True:
        done = store.retire(pipeline, request)
        first = first or done
        dropped += done.dropped
        if not (done.are_more and request.is_confirmed):
            return done._replace(already=first.already, dropped=dropped)


def _outlook(pipeline: str, done: "Retirement", *, drops: bool) -> str:
    begin = f"{pipeline} would be retired at txid {done.committed}: no batch of it would count any more."
    if done.already:
        begin = f"{pipeline} is retired."
    states = f"Its states would be dropped permanently: {_listed(done.dropped)}." if drops else _kept(done)
    return " ".join([begin, *_left(done), states, *_mentioned(done)])


def _report(pipeline: str, done: "Retirement") -> str:
    at, by, reason = done.retired
    if done.already and not done.dropped:
        return f"{pipeline} was retired already, on {at:%Y-%m-%d %H:%M} UTC by {by}: {reason}"
    states = f"Its states are dropped: {_listed(done.dropped)}." if done.dropped else _kept(done)
    is_rebuild = named_rebuild(pipeline) is not None
    back = "" if done.dropped or is_rebuild else f" To let it go on where it stood: tidegate reinstate {pipeline}"
    remove = "Take its files away: the pipeline and its Dag." if has_pipeline(pipeline) and not is_rebuild else ""
    begin = f"{pipeline} is retired at txid {done.committed}."
    return " ".join(filter(None, [begin, *_left(done), states, *_mentioned(done), remove])) + back


def _left(done: "Retirement") -> list[str]:
    left = []
    if done.uncommitted:
        left.append(f"{output.counted(done.uncommitted, 'opened batch', 'opened batches')} will never count.")
    if done.quarantined:
        left.append(f"{output.counted(done.quarantined, 'bad record stays', 'bad records stay')} in quarantine.")
    if done.acks_due:
        batches = output.counted(done.acks_due, "batch", "batches")
        left.append(f"The source has not had its ack for {batches}: files are not moved away, for example.")
    return left


def _kept(done: "Retirement") -> str:
    return f"Its states stay as tables that can be read: {_listed(done.states)}." if done.states else ""


def _mentioned(done: "Retirement") -> list[str]:
    names = done.mentioned_by
    return [f"The {'source' if len(names) == 1 else 'sources'} of {_listed(names)} may read these tables."] if names else []


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _facts(pipeline: str, done: "Retirement", staged: int) -> Mapping[str, Any]:
    return {
        "pipeline": pipeline,
        "retired": True,
        "already": done.already,
        **dict(zip(("retired_at", "retired_by", "retired_reason"), done.retired, strict=True)),
        **{name: getattr(done, name) for name in _SHOWN},
        "staging_dropped": staged,
    }
