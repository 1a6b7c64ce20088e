"""The verbs for batches and pipelines that need an operator: retry, skip, redo, pause, resume."""

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from jobs.registry import find_pipeline
from state_store.errors import RangeRefused, UsageError
from state_store.settings import Settings, account_name
from tidegate import output, tracing
from tidegate.commands import AT_LEAST_ONE, as_json, pipeline_name, runs, verbose
from tidegate.progress import ranges

if TYPE_CHECKING:
    from state_store import StateStore
    from state_store.history import BatchStatus

NO_REASON = "no reason given"
FINAL_PHASES = ("committed", "skipped")
REASON_HELP = "Why; the ledger keeps it."

reason = click.option("--reason", required=True, help=REASON_HELP)
reason_if_any = click.option("--reason", default=NO_REASON, help=REASON_HELP)
yes = click.option("--yes", is_flag=True, help="Do it; without this, only show what would be done.")


@click.command()
@pipeline_name
@click.argument("txid", type=AT_LEAST_ONE, required=False, help="Only this txid [default: all that wait for a person].")
@reason_if_any
@runs.wait
@runs.wait_seconds
@runs.here
@as_json
def retry(pipeline: str, txid: int | None, reason: str, wait: bool, wait_seconds: int, here: bool, as_json: bool) -> None:
    """Allow halted or given-up batches to be tried again, and start a run that takes up what was left over."""
    from state_store import StateStore  # noqa: PLC0415 - loads SQLAlchemy, which other verbs do without

    find_pipeline(pipeline)
    with StateStore.connect(Settings.load()) as store:
        store.check_not_paused(pipeline)
        if txid is not None and (status := _status(store, pipeline, txid)).phase in FINAL_PHASES:
            _report(f"{pipeline} {txid} has {_ended(status)}: nothing to retry.", {"pipeline": pipeline, "lifted": []}, as_json)
            return
        lifted = store.retry(pipeline, txid, operator("retry"), require_reason(reason))
        newest = store.last_opened(pipeline)
        left_over = [] if lifted else store.uncommitted(pipeline, limit=1000)
    if not lifted or newest is None:
        message = f"Nothing to retry: no batch of {pipeline} is halted or was given up."
        if left_over:
            message += f" {ranges(left_over).capitalize()} wait for a run: tidegate trigger {pipeline} --wait"
        _report(message, {"pipeline": pipeline, "lifted": []}, as_json)
        return
    prepared = runs.Prepared(f"{pipeline}: {ranges(lifted)} may be tried again.", {"lifted": lifted})
    runs.take_up(pipeline, prepared, newest.txid, wait=wait_seconds if wait else None, here=here, as_json=as_json)


@click.command()
@pipeline_name
@click.argument("txid", type=AT_LEAST_ONE, help="The txid that has failed; not only the next one.")
@reason
@yes
@as_json
def skip(pipeline: str, txid: int, reason: str, yes: bool, as_json: bool) -> None:
    """Give up a batch that cannot be processed: order goes on without its rows; the ledger keeps operator and reason."""
    from state_store import StateStore  # noqa: PLC0415

    spec, why = find_pipeline(pipeline).spec, require_reason(reason, "the exporter cut the file off")
    with StateStore.connect(Settings.load()) as store:
        status = _status(store, pipeline, txid)
        if not yes and status.phase not in FINAL_PHASES:
            _check_failed(store, status)
            why_not = (status.waits_for or "").rstrip(".")
            raise UsageError(
                f"{pipeline} {txid} is {status.phase} ({why_not}). Skipping it leaves all its rows out of the "
                "states, permanently. Add --yes to do it."
            )
        done = store.skip_batch(spec, txid, operator("skip"), why)
    if done is None:
        message = f"{pipeline} {txid} is given up: it is skipped as soon as the txids before it have committed"
    else:
        message = str(done)
    facts = {
        "txid": txid,
        "skipped": done is not None and done.skipped_reason is not None,
        "given_up": done is None or done.skipped_reason is not None,
        "already": done is not None and done.already_committed,
    }
    _report(f"{message}. Go on: tidegate trigger {pipeline} --wait", facts, as_json)


@click.command()
@pipeline_name
@click.argument("txid", type=AT_LEAST_ONE, help="The last committed txid.")
@reason
@yes
@verbose
@as_json
def redo(pipeline: str, txid: int, reason: str, yes: bool, verbose: bool, as_json: bool) -> None:
    """Process the last committed batch again, in this process, and replace what it did; for opaque states only."""
    from state_store import StateStore  # noqa: PLC0415
    from state_store.operations import check_redoable  # noqa: PLC0415

    output.show_log(logging.INFO if verbose else logging.ERROR)
    declared, settings = find_pipeline(pipeline), Settings.load()
    why = require_reason(reason, "the source was wrong at midnight")
    with StateStore.connect(settings) as store:
        status = _status(store, pipeline, txid)
        check_redoable(declared.spec, txid, store.committed(pipeline))
    if not yes:
        origin = "" if declared.source.kind == "transactional" else ", from what its source holds now"
        raise UsageError(
            f"{pipeline} {txid} has {_ended(status)}, with {status.key_count} keys. Redoing it takes back what it did to "
            f"{', '.join(declared.states)}, and processes it again{origin}. Add --yes to do it."
        )
    from jobs.engine.worker import Worker  # noqa: PLC0415 - loads pyspark

    with tracing.traced("redo", pipeline), Worker.open(settings, declared, owner=operator("redo")) as worker:
        done = worker.redo(txid, why)
    _report(f"{done}, in the place of attempt {status.attempt}.", {**asdict(done), "replaced": status.attempt}, as_json)


@click.command()
@pipeline_name
@reason
@as_json
def pause(pipeline: str, reason: str, as_json: bool) -> None:
    """Block new runs of a pipeline, wherever they would be started; what has been planned goes on."""
    from state_store import StateStore  # noqa: PLC0415

    find_pipeline(pipeline)
    why = require_reason(reason, "the warehouse is moved")
    with StateStore.connect(Settings.load()) as store:
        changed = store.pause(pipeline, operator("pause"), why)
        (now,) = store.lag([pipeline])
    if changed:
        message = (
            f"{pipeline} is paused: no new run starts, what has been planned goes on. Go on with: tidegate resume {pipeline}"
        )
    else:
        message = (
            f"{pipeline} was paused already, on {now.paused_at:%Y-%m-%d %H:%M} UTC by {now.paused_by}: {now.paused_reason}"
        )
    facts = {"paused": now.paused_at is not None, "already": not changed, "paused_at": now.paused_at}
    by = {"paused_by": now.paused_by, "paused_reason": now.paused_reason}
    _report(message, {"pipeline": pipeline, **facts, **by}, as_json)


@click.command()
@pipeline_name
@reason_if_any
@as_json
def resume(pipeline: str, reason: str, as_json: bool) -> None:
    """Let runs of a paused pipeline start again."""
    from state_store import StateStore  # noqa: PLC0415

    find_pipeline(pipeline)
    with StateStore.connect(Settings.load()) as store:
        changed = store.resume(pipeline, operator("resume"), require_reason(reason))
    goes_on = f"{pipeline} goes on. Its next run: tidegate trigger {pipeline} --wait"
    message = goes_on if changed else f"{pipeline} was not paused."
    _report(message, {"pipeline": pipeline, "paused": False, "already": not changed}, as_json)


def operator(verb: str) -> str:
    """Return the operator's name for the ledger: the account, the name that the environment claims, and the verb."""
    account, claimed = account_name(os.getuid()), os.environ.get("SUDO_USER") or os.environ.get("LOGNAME")
    name = account if claimed in (None, "", account) else f"{account} (says {claimed})"
    return f"{name}, tidegate {verb}"


def require_reason(reason: str, example: str = "the server is back") -> str:
    """Return the reason without surrounding spaces.

    Raises: UsageError with the example if it is empty.
    """
    if not reason.strip():
        raise UsageError(f"Give a reason: --reason '{example}'")
    return reason.strip()


def _status(store: "StateStore", pipeline: str, txid: int) -> "BatchStatus":
    """Return a batch's status.

    Raises: UnknownBatch.
    """
    return store.batch_history(pipeline, txid).status


def _check_failed(store: "StateStore", status: "BatchStatus") -> None:
    """Refuse to skip a batch that may still commit, as the store does.

    Raises: RangeRefused.
    """
    batch = (status.pipeline, status.txid)
    if status.phase in ("planned", "processing", "processed") and not store.turns([batch])[batch].given_up:
        raise RangeRefused(
            f"{status.pipeline} {status.txid} has not failed, it is {status.phase}: only failed batches are skipped.",
            pipeline=status.pipeline,
            txid=status.txid,
        )


def _ended(status: "BatchStatus") -> str:
    return "been skipped" if status.phase == "skipped" else f"committed on {status.committed_at:%Y-%m-%d %H:%M} UTC"


def _report(message: str, facts: Mapping[str, object], as_json: bool) -> None:
    if as_json:
        output.print_json(facts)
    else:
        output.say(message)
