"""The verbs retry, skip, redo, prune, pause, resume; redo and prune ask first, unless `--yes` is given."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from tidegate import completion, operator_actions, output
from tidegate.commands import AT_LEAST_ONE, as_json, connected, pipeline_name, verbose, yes
from tidegate.commands.act import run_verbs
from tidegate.commands.act.operator_name import operator
from tidegate.explain import remedies
from tidegate.jobs.registry import find_pipeline
from tidegate.operator_actions import require_reason
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, StateSpec
from tidegate.state_store.read_ledger.batch_phases import ENDED

if TYPE_CHECKING:
    from tidegate.state_store import StateStore
    from tidegate.state_store.operate.pruning import Pruned, PrunedRanges, Removal

NO_REASON = "no reason given"
SHOWN_PARTITIONS = 5
REASON_HELP = "Why; the ledger keeps it."

reason = click.option("--reason", required=True, help=REASON_HELP)
reason_if_any = click.option("--reason", default=NO_REASON, help=REASON_HELP)


@click.command()
@pipeline_name
@click.argument("txid", type=AT_LEAST_ONE, required=False, help="Only this txid [default: all that wait for a person].")
@reason_if_any
@run_verbs.wait
@run_verbs.wait_seconds
@run_verbs.here
@as_json
def retry(pipeline: str, txid: int | None, reason: str, wait: bool, wait_seconds: int, here: bool, as_json: bool) -> None:
    """Allow halted or given-up batches to be tried again, and start a run that takes up what was left over."""
    from tidegate.explain import why  # noqa: PLC0415

    find_pipeline(pipeline)
    with connected() as store:
        done = operator_actions.retry(store, pipeline, txid, operator("retry"), require_reason(reason))
        newest = store.last_opened(pipeline)
        for sentence in why.refused_next(pipeline, store):
            click.echo(sentence, err=True)
    if not done.txids or newest is None:
        next_step = f": {remedies.run_of(pipeline, store.settings)}" if done.run_needed else "."
        message = done.message.removesuffix(".") + next_step
        output.report(message, {"pipeline": pipeline, "lifted": []}, as_json)
        return
    prepared = run_verbs.Prepared(done.message, {"lifted": list(done.txids)})
    run_verbs.take_up(pipeline, prepared, newest.txid, wait=wait_seconds if wait else None, here=here, as_json=as_json)


@click.command()
@pipeline_name
@click.argument("txid", type=AT_LEAST_ONE, help="The txid that has failed; not only the next one.")
@reason
@yes
@as_json
def skip(pipeline: str, txid: int, reason: str, yes: bool, as_json: bool) -> None:
    """Give up a batch that cannot be processed: order goes on without its rows; the ledger keeps operator and reason."""
    spec, why = find_pipeline(pipeline).spec, require_reason(reason, "the exporter cut the file off")
    with connected() as store:
        status = operator_actions.status_of(store, pipeline, txid)
        if not yes and status.phase not in ENDED:
            operator_actions.check_failed(status, is_given_up=store.turn(pipeline, txid).given_up)
            raise UsageError(f"{operator_actions.what_skipping_does(status)} Add --yes to do it.")
        done, commit = operator_actions.skip(store, spec, txid, operator("skip"), why)
    facts = {
        "txid": txid,
        "skipped": commit is not None and commit.skipped_reason is not None,
        "given_up": commit is None or commit.skipped_reason is not None,
        "already": commit is not None and commit.already_committed,
    }
    output.report(f"{done.message} Go on: {remedies.run_of(pipeline, store.settings)}", facts, as_json)


@click.command()
@pipeline_name
@click.argument("txid", type=AT_LEAST_ONE, help="The last committed txid.")
@click.option(
    "--without",
    metavar="PIPELINE",
    multiple=True,
    help="Although this pipeline follows a state, as it is not run any more; repeatable.",
)
@reason
@yes
@verbose
@as_json
def redo(pipeline: str, txid: int, without: tuple[str, ...], reason: str, yes: bool, verbose: bool, as_json: bool) -> None:
    """Process the last committed batch again, in this process, and replace what it did; for opaque states only."""
    from tidegate.state_store.operate.redo_refusals import check_redoable  # noqa: PLC0415 - loads SQLAlchemy

    output.show_log(logging.INFO if verbose else logging.ERROR)
    declared, why = find_pipeline(pipeline), require_reason(reason, "the source was wrong at midnight")
    with connected() as store:
        status = operator_actions.status_of(store, pipeline, txid)
        check_redoable(declared.spec, txid, store.committed(pipeline))
        store.check_not_followed(declared.spec, txid, without)
    if not yes:
        origin = "" if declared.source.kind == "transactional" else ", from what its source holds now"
        raise UsageError(f"{operator_actions.what_redoing_does(status, declared.states, origin)} Add --yes to do it.")
    from tidegate.jobs.engine.worker import Worker  # noqa: PLC0415 - loads pyspark

    with Worker.open(store.settings, declared, owner=operator("redo")) as worker:
        done = worker.redo(txid, why, without=without)
    output.report(f"{done}, in the place of attempt {status.attempt}.", {**asdict(done), "replaced": status.attempt}, as_json)


@click.command()
@pipeline_name
@click.argument(
    "state", shell_complete=completion.states, help="The state's name; it records changes, or has range partitions."
)
@click.option("--keep", metavar="N", type=click.IntRange(0), help="Of changes: keep those of the last N txids.")
@click.option(
    "--before", metavar="VALUE", help="Of range partitions: remove those that end at or before this date, time (UTC) or number."
)
@click.option("--detach", is_flag=True, help="Of range partitions: keep their tables, without being part of the state.")
@click.option(
    "--without", metavar="PIPELINE", multiple=True, help="Keep none for this follower, which is not run any more; repeatable."
)
@reason_if_any
@yes
@as_json
def prune(
    pipeline: str,
    state: str,
    keep: int | None,
    before: str | None,
    detach: bool,
    without: tuple[str, ...],
    reason: str,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove old changes of a state, or old range partitions of its rows, as far as no pipeline that follows it needs them."""
    declared = find_pipeline(pipeline).spec
    pruning = _Pruning(declared, _prunable(declared, state), without, require_reason(reason), yes, as_json)
    if before is not None and keep is None and pruning.state.ranges:
        pruning.prune_ranges(before, detach=detach)
    elif keep is not None and before is None and not detach and pruning.state.records:
        pruning.prune_changes(keep)
    elif pruning.state.ranges:
        raise UsageError(f"State {state} has range partitions: say with --before which of them are removed.")
    else:
        raise UsageError(f"State {state} records its changes: say with --keep of how many txids they are kept.")


def _prunable(pipeline: PipelineSpec, state: str) -> StateSpec:
    found = pipeline.state(state)
    if found is None or not (found.records or found.ranges):
        raise UsageError(
            f"Pipeline {pipeline.name} has no state {state} that records changes or final windows, or has range partitions."
        )
    return found


@dataclass(frozen=True)
class _Pruning:
    """What of a state is removed, for which followers nothing is kept, and how that is reported."""

    pipeline: PipelineSpec
    state: StateSpec
    without: tuple[str, ...]
    why: str
    yes: bool
    as_json: bool

    def prune_changes(self, keep: int) -> None:
        """Remove the changes of all but so many txids."""
        from tidegate.jobs.sources.changes import removable  # noqa: PLC0415

        name = self.state.name
        with connected() as store:
            up_to_txid, needed = removable(store, self.pipeline, self.state, keep, without=self.without)
            before = store.pruned_txid(self.state)
            is_done = up_to_txid <= before and not store.has_changes(self.state, up_to_txid)
        held = [name for name, txid in needed.items() if txid == up_to_txid]
        by = f" {', '.join(held)} {'needs' if len(held) == 1 else 'need'} the later ones." if held else ""
        facts = self._facts(max(up_to_txid, before), needed)
        if is_done:
            message = f"There is nothing to remove: changes of {name} are kept from txid {before + 1} on.{by}"
            output.report(message, facts, self.as_json)
            return
        if not self.yes:
            first = min(before + 1, up_to_txid)  # some of it are left if a command before did not come to its end
            raise UsageError(
                f"The changes of {name} by txids {first} to {up_to_txid} would be removed.{by} Add --yes to do it."
            )
        with connected(as_owner=True) as store:
            done = self._removed_changes(store, up_to_txid)
        message = f"{_removed_in_words(done)} of {name} removed, up to txid {up_to_txid}.{by}"
        output.report(message, facts | {"changes": done.changes, "partitions": list(done.partitions)}, self.as_json)

    def _removed_changes(self, store: "StateStore", up_to_txid: int) -> "Pruned":
        from tidegate.state_store.operate.pruning import Pruned  # noqa: PLC0415

        done = Pruned(up_to_txid)
        while done.are_more:
            done = store.prune_changes(self.pipeline, self.state, done, operator("prune"), self.why)
        return done

    def prune_ranges(self, before: str, *, detach: bool) -> None:
        """Remove the partitions that end at or before a value."""
        from tidegate.jobs.sources.changes import removable  # noqa: PLC0415
        from tidegate.state_store.operate.pruning import Removal  # noqa: PLC0415

        with connected(as_owner=True) as store:
            up_to_txid, needed = removable(store, self.pipeline, self.state, 0, without=self.without)
            removed, kept, done = self._removed(store, Removal(before, up_to_txid, detach, is_confirmed=self.yes))
            facts = self._facts(store.pruned_txid(self.state), needed) | {"partitions": removed, "kept": kept}
        held = [name for name, txid in needed.items() if txid == up_to_txid]
        by = f" {' and '.join(held)} may need {done.needed} and later ones." if done.needed else ""
        what = _names(removed) or f"{len(removed)} partitions"
        done_to = "detached" if detach else "removed"
        if not removed and done.needed:
            message = f"There is nothing to remove yet.{by}"
        elif not removed:
            message = f"There is nothing to remove: {self.state.name} has no partition that ends by {before}."
        elif not self.yes:
            raise UsageError(f"{what}{' and more' if done.are_more else ''} would be {done_to}.{by} Add --yes to do it.")
        else:
            message = f"{what} {done_to}.{_listed(kept)}{by}"
        output.report(message, facts, self.as_json)

    def _removed(self, store: "StateStore", removal: "Removal") -> tuple[list[str], list[str], "PrunedRanges"]:
        """Remove partitions until there are no more, or only look; return which, the kept tables and the last outcome."""
        removed: list[str] = []
        kept: list[str] = []
        while True:
            done = store.prune_ranges(self.pipeline, self.state, removal, operator("prune"), self.why)
            removed += done.partitions
            kept += done.kept
            if not (done.are_more and removal.is_confirmed):
                return removed, kept, done

    def _facts(self, up_to_txid: int, needed: Mapping[str, int]) -> dict[str, Any]:
        of = {"pipeline": self.pipeline.name, "state": self.state.name}
        return of | {"up_to_txid": up_to_txid, "changes": 0, "partitions": [], "kept": [], "followers": dict(needed)}


def _removed_in_words(done: "Pruned") -> str:
    whole = [_names(done.partitions) or f"{len(done.partitions)} partitions"] if done.partitions else []
    if whole and not done.changes:
        return whole[0]
    more = "more " if whole else ""
    changes = output.counted(done.changes, f"{more}change", f"{more}changes")
    return " and ".join([*whole, changes])


def _names(tables: Sequence[str]) -> str:
    return ", ".join(tables) if len(tables) <= SHOWN_PARTITIONS else ""


def _listed(kept: Sequence[str]) -> str:
    if not kept:
        return ""
    if len(kept) == 1:
        return f" Now it is table state.{kept[0]}."
    return f" Now they are tables {_names(kept) or f'{kept[0]} to {kept[-1]}'} in schema state."


@click.command()
@pipeline_name
@reason
@as_json
def pause(pipeline: str, reason: str, as_json: bool) -> None:
    """Block new runs of a pipeline, wherever they would be started; batches in work end, and no other begins."""
    find_pipeline(pipeline)
    why = require_reason(reason, "the warehouse is moved")
    with connected() as store:
        done, changed, now = operator_actions.pause(store, pipeline, operator("pause"), why)
    message = f"{done.message} Go on with: tidegate resume {pipeline}" if changed else done.message
    facts = {"paused": now.paused_at is not None, "already": not changed, "paused_at": now.paused_at}
    by = {"paused_by": now.paused_by, "paused_reason": now.paused_reason}
    output.report(message, {"pipeline": pipeline, **facts, **by}, as_json)


@click.command()
@pipeline_name
@reason_if_any
@as_json
def resume(pipeline: str, reason: str, as_json: bool) -> None:
    """Let runs of a paused pipeline start again."""
    find_pipeline(pipeline)
    with connected() as store:
        done, changed = operator_actions.resume(store, pipeline, operator("resume"), require_reason(reason))
    message = f"{done.message} Its next run: {remedies.run_of(pipeline, store.settings)}" if changed else done.message
    output.report(message, {"pipeline": pipeline, "paused": False, "already": not changed}, as_json)
