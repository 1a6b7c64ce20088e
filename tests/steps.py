"""The steps of a batch: each with a worker of its own, as in separate tasks, or all by one, as in a run without Airflow."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tests.store import Attempt, BatchHistory, Commit, Mend, PipelineSpec, Pruned, StateSpec
from tidegate.jobs import Pipeline
from tidegate.jobs.compute.shortcuts import SAFE, Route, Routing, choose
from tidegate.jobs.engine.processing import Processed
from tidegate.jobs.engine.worker import Worker
from tidegate.jobs.sources import InputFacts
from tidegate.state_store import Settings, StateStore


def plan(settings: Settings, pipeline: Pipeline | str, *, run_id: str, **limits: Any) -> list[int]:
    with Worker.open(settings, pipeline, owner=run_id) as worker:
        return worker.plan(run_id, **limits)


def process(
    settings: Settings, pipeline: Pipeline | str, txid: int, *, owner: str, commit_ready: bool = False, **options: Any
) -> Processed:
    """Process a batch, by a `mode` and a `routing` if given; with `commit_ready`, then commit all ready batches."""
    mode = options.pop("mode", "resume")
    with Worker.open(settings, pipeline, owner=owner, **options) as worker:
        return worker.process_and_commit(txid, mode=mode) if commit_ready else worker.process(txid, mode=mode)


def commit(settings: Settings, pipeline: Pipeline | str, txid: int, *, owner: str) -> Commit:
    with Worker.open(settings, pipeline, owner=owner) as worker:
        return worker.commit(txid)


def complete(
    settings: Settings, pipeline: Pipeline | str, *txids: int, owner: str = "test", mode: Any = "resume", **options: Any
) -> None:
    """Process and commit planned batches, one after another, by one worker."""
    with Worker.open(settings, pipeline, owner=owner, **options) as worker:
        _complete(worker, txids, mode)


def run(settings: Settings, pipeline: Pipeline | str, run_id: str, **options: Any) -> list[int]:
    """Plan, process and commit all batches that can be planned, one after another, by one worker."""
    with Worker.open(settings, pipeline, owner=run_id, **options) as worker:
        txids = worker.plan(run_id)
        _complete(worker, txids)
    return txids


def _complete(worker: Worker, txids: Iterable[int], mode: Any = "resume") -> None:
    for txid in txids:
        worker.process(txid, mode=mode)
        worker.commit(txid)


def history(settings: Settings, txid: int, pipeline: str = "inbox") -> BatchHistory:
    with StateStore.connect(settings) as store:
        return store.batch_history(pipeline, txid)


def metadata(settings: Settings, txid: int) -> dict[str, Any]:
    with StateStore.connect(settings) as store:
        return dict(store.source_metadata("inbox", txid))


def rows(settings: Settings, pipeline: Pipeline, state: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of a state, by default the first."""
    with StateStore.connect(settings) as store:
        return list(store.state_rows(pipeline.spec.state(state) if state else pipeline.spec.states[0]))


def counts(settings: Settings, pipeline: Pipeline) -> dict[str, tuple[int, int]]:
    """Return lines and amount of each name."""
    return {row["name"]: (row["lines"], row["amount"]) for row in rows(settings, pipeline)}


def waiting(settings: Settings) -> list[dict[str, Any]]:
    with StateStore.connect(settings) as store:
        return list(store.quarantined("inbox"))


def mend(settings: Settings, record: Mapping[str, Any], payload: str) -> None:
    with StateStore.connect(settings) as store:
        store.mend_quarantined("inbox", record["txid"], record["number"], Mend(payload, "test", "it was wrong"))


def redo(settings: Settings, pipeline: Pipeline | str, txid: int, *, owner: str, reason: str) -> Commit:
    with Worker.open(settings, pipeline, owner=owner) as worker:
        return worker.redo(txid, reason)


def prune(owner: StateStore, spec: PipelineSpec, state: StateSpec, up_to_txid: int) -> Pruned:
    """Remove the recorded changes of txids up to this one, as the command does."""
    done = Pruned(up_to_txid)
    while done.are_more:
        done = owner.prune_changes(spec, state, done, "an operator", "they are old")
    return done


def safe(_pipeline: Pipeline, _attempt: Attempt, _facts: InputFacts) -> Route:
    """Take no shortcut."""
    return SAFE


def on_executors(pipeline: Pipeline, attempt: Attempt, facts: InputFacts) -> Route:
    """Take all shortcuts but staging in process."""
    return replace(choose(pipeline, attempt, facts), in_process=frozenset())


def shuffled(pipeline: Pipeline, attempt: Attempt, facts: InputFacts) -> Route:
    """Take all shortcuts but those for a single task that reads the whole batch."""
    return replace(choose(pipeline, attempt, facts), one_task=False, is_brief=False, follows_partials=None)


ROUTINGS: dict[str, Routing] = {"chosen": choose, "safe": safe, "on executors": on_executors, "shuffled": shuffled}
