"""The verbs that start runs: through Airflow (trigger, backfill) or in this process (run)."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from tidegate import output
from tidegate.commands import AT_LEAST_ONE, as_json, connected, log_json, pipeline_name, verbose
from tidegate.explain import remedies, source_report, why
from tidegate.jobs.engine.txid_ranges import MAX_BATCHES_PER_RUN, next_run
from tidegate.jobs.registry import find_pipeline, named_rebuild
from tidegate.state_store.base.errors import RetryableError, TidegateError, UsageError, class_of
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.read_ledger.batch_phases import ENDED
from tidegate.status import run_progress
from tidegate.status.run_progress import ranges
from tidegate.status.status_report import waits_for

if TYPE_CHECKING:
    from tidegate.airflow_client import AirflowClient
    from tidegate.state_store import StateStore

POLL_SECONDS = 0.5
AWAY_SECONDS = 120  # how long a server may be away while a run is followed
FINISHED = ("success", "failed")

from_txid = click.option("--from-txid", metavar="TXID", type=AT_LEAST_ONE, help="First txid of the range.")
to_txid = click.option("--to-txid", metavar="TXID", type=AT_LEAST_ONE, help="Last txid of the range.")
max_batches = click.option("--max-batches", metavar="N", type=AT_LEAST_ONE, help="At most N batches, left-over ones first.")
wait = click.option("--wait/--no-wait", help="Follow the run until it ends.")
wait_seconds = click.option("--wait-seconds", metavar="N", type=AT_LEAST_ONE, default=3600, help="Longest time to follow it.")
here = click.option("--here", is_flag=True, help="Run in this process, as `tidegate run` does, also if there is Airflow.")


class RunUnfinished(RetryableError):
    """A run ended, or the wait for it ended, before all of its batches had committed."""


@dataclass
class Outcome:
    """The batches of a run and its progress; `runs` are the Dag runs that have gone on with its backlog so far, in order."""

    pipeline: str
    run_id: str
    state: str = "queued"
    txids: list[int] = field(default_factory=list)
    phases: dict[int, str] = field(default_factory=dict)
    already_committed: list[int] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)

    @property
    def committed(self) -> list[int]:
        """Return the txids of the run that have committed."""
        return self._in_phase("committed")

    @property
    def skipped(self) -> list[int]:
        """Return the txids of the run that were given up, and skipped in their turn."""
        return self._in_phase("skipped")

    @property
    def left_over(self) -> list[int]:
        """Return the txids of the run that have neither committed nor been skipped."""
        return [txid for txid in self.txids if self.phases.get(txid) not in ENDED]

    def _in_phase(self, phase: str) -> list[int]:
        return [txid for txid in self.txids if self.phases.get(txid) == phase]


@dataclass(frozen=True)
class Prepared:
    """A verb's changes to the ledger before it starts a run: a message for people, facts for programs."""

    message: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


UNPREPARED = Prepared()


@click.command()
@pipeline_name
@from_txid
@to_txid
@max_batches
@wait
@wait_seconds
@as_json
def trigger(pipeline: str, wait: bool, wait_seconds: int, as_json: bool, **of_range: int | None) -> None:
    """Start a Dag run of the pipeline in Airflow; with --wait, show its txids as they process and commit."""
    through_airflow(pipeline, _given(of_range), wait_seconds if wait else None, as_json)


@click.command()
@pipeline_name
@click.option("--from-txid", metavar="TXID", type=AT_LEAST_ONE, required=True, help="First txid of the range.")
@click.option("--to-txid", metavar="TXID", type=AT_LEAST_ONE, required=True, help="Last txid of the range.")
@click.option("--dry-run/--no-dry-run", help="Only show what would be done.")
@wait_seconds
@as_json
def backfill(pipeline: str, from_txid: int, to_txid: int, dry_run: bool, wait_seconds: int, as_json: bool) -> None:
    """Open, process and commit, through Airflow and in order, the uncommitted batches between two txids."""
    find_pipeline(pipeline)
    parameters = {"from_txid": from_txid, "to_txid": to_txid}
    with connected() as store:
        committed, opened = _position(store, pipeline, parameters)
    if to_txid > (last := max(opened, committed) + MAX_BATCHES_PER_RUN):
        raise UsageError(
            f"{pipeline} has opened {f'txid {opened}' if opened else 'no txid'} so far, and a backfill opens at most "
            f"{MAX_BATCHES_PER_RUN} batches: end at {last}, and go on from there."
        )
    if dry_run:
        _show_plan(pipeline, range(from_txid, to_txid + 1), committed, opened, as_json)
        return
    if to_txid <= committed:
        _report(Outcome(pipeline, "none", "success", already_committed=list(range(from_txid, to_txid + 1))), as_json)
        return
    outcome = through_airflow(pipeline, parameters, wait_seconds, as_json)
    done = {*outcome.already_committed, *outcome.txids}  # the run has ended well
    if missing := [txid for txid in range(from_txid, to_txid + 1) if txid not in done]:
        raise RunUnfinished(
            f"The source of {pipeline} has no data yet for {ranges(missing)}, or one run could not take them all. Run it again."
        )


def _show_plan(pipeline: str, requested: range, committed: int, opened: int, as_json: bool) -> None:
    plan = {
        "already_committed": [txid for txid in requested if txid <= committed],
        "opened_before": [txid for txid in requested if committed < txid <= opened],
        "to_open": [txid for txid in requested if txid > opened],
    }
    if as_json:
        output.print_json(plan)
    else:
        output.print_table(
            f"Backfill of {pipeline}", ["what", "which"], [[name, ranges(txids)] for name, txids in plan.items()]
        )


@click.command()
@pipeline_name
@from_txid
@to_txid
@max_batches
@verbose
@log_json
@as_json
def run(pipeline: str, verbose: bool, log_json: bool, as_json: bool, **of_range: int | None) -> None:
    """Plan, process and commit in this process, without Airflow; same steps, same guarantee."""
    output.show_log(logging.INFO if verbose or log_json else logging.ERROR, as_json=log_json)
    in_this_process(pipeline, _given(of_range), as_json)


def _given(of_range: Mapping[str, int | None]) -> dict[str, int]:
    return {name: value for name, value in of_range.items() if value is not None}


def take_up(pipeline: str, prepared: Prepared, to_txid: int, *, wait: int | None, here: bool, as_json: bool) -> None:
    """Run the batches that a verb has prepared and all left-over ones before them, through Airflow or in this process.

    Without Airflow, all is done in this process, and so is a rebuild, which has no Dag.
    """
    if here or not Settings.load().has_airflow or named_rebuild(pipeline) is not None:
        output.show_log(logging.ERROR)
        in_this_process(pipeline, {"to_txid": to_txid}, as_json, prepared)
    else:
        through_airflow(pipeline, {"to_txid": to_txid}, wait, as_json, prepared)


def in_this_process(pipeline: str, parameters: dict[str, int], as_json: bool, prepared: Prepared = UNPREPARED) -> None:
    """Run a pipeline in this process, show its progress, and report."""
    find_pipeline(pipeline)
    if prepared.message and not as_json:
        output.say(prepared.message)
    outcome = run_here(pipeline, parameters, quiet=as_json)
    if parameters:
        with connected() as store:
            outcome.already_committed = _others(outcome, parameters, store.committed(pipeline))
    _report(outcome, as_json, prepared)


def run_here(pipeline: str, parameters: dict[str, int], *, quiet: bool) -> Outcome:
    """Run a pipeline in this process, and show its progress, unless it is `quiet`; return what has become of its batches."""
    from tidegate.jobs.engine.local_run import run_pipeline  # noqa: PLC0415 - loads pyspark, which few verbs need

    settings = Settings.load()
    outcome = Outcome(pipeline, f"run {datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}")
    with run_progress.shown(outcome, quiet=quiet) as refresh:

        def on_progress(txid: int, event: str) -> None:
            if event == "planned":
                outcome.txids.append(txid)
            outcome.phases[txid] = event
            refresh()

        done = run_pipeline(settings, pipeline, run_id=outcome.run_id, progress=on_progress, **parameters)
        if skipped := [commit.txid for commit in done.commits if commit.skipped_reason is not None]:
            outcome.phases |= dict.fromkeys(skipped, "skipped")
            refresh()
    outcome.state = "success"
    return outcome


def through_airflow(
    pipeline: str, parameters: dict[str, int], wait_seconds: int | None, as_json: bool, prepared: Prepared = UNPREPARED
) -> Outcome:
    """Start a Dag run, follow it as long as `wait_seconds` (None: not at all), and report.

    If no run can be started, the error also says what was prepared for it: that stays done.
    """
    from tidegate.airflow_client import AirflowClient  # noqa: PLC0415 - verbs that do not need it start faster

    find_pipeline(pipeline)
    with connected(settings := Settings.load()) as store:
        committed, _ = _position(store, pipeline, parameters)
        with contextlib.ExitStack() as until:
            try:
                airflow = until.enter_context(contextlib.closing(AirflowClient(settings)))
                run_id = airflow.trigger(pipeline, parameters)
                outcome = Outcome(pipeline, run_id, runs=[run_id])
            except TidegateError as error:
                if not settings.has_airflow:
                    raise type(error)(f"{error}. Without Airflow: {remedies.run_of(pipeline, settings, parameters)}") from error
                if not prepared.message:
                    raise
                raise type(error)(
                    f"{prepared.message} But no run has started: {error} Then go on: tidegate trigger {pipeline} --wait"
                ) from error
            outcome.already_committed = _others(outcome, parameters, committed)
            if prepared.message and not as_json:
                output.say(prepared.message)
            if wait_seconds is None:
                _report(outcome, as_json, prepared)
                return outcome
            if not as_json:
                output.say(f"Dag run {outcome.run_id}: {settings.airflow_url}/dags/{pipeline}/runs/{outcome.run_id}")
            _follow(store, airflow, outcome, wait_seconds, quiet=as_json)
            # Another run may have committed some since, such as the one that this one was queued after.
            outcome.already_committed = _others(outcome, parameters, store.committed(pipeline))
            failed = airflow.task_instances(pipeline, outcome.runs[-1], "failed") if outcome.state == "failed" else []
            _check_planned(store, airflow, outcome)
        _report(outcome, as_json, prepared)
        if outcome.state == "failed":
            raise _failure(store, outcome, [str(task["task_id"]) for task in failed])
        _check_committed(outcome)
    return outcome


def _position(store: "StateStore", pipeline: str, parameters: dict[str, int]) -> tuple[int, int]:
    """Return the last committed and last opened txid; refuse what the run would refuse: a range, a database without commits."""
    from tidegate.jobs.engine.txid_ranges import check_range  # noqa: PLC0415

    store.check_not_paused(pipeline)
    store.check_history(pipeline)
    committed, newest = store.committed(pipeline), store.last_opened(pipeline)
    opened = newest.txid if newest else 0
    check_range(pipeline, committed, parameters.get("from_txid"), parameters.get("to_txid"))
    return committed, opened


def _others(outcome: Outcome, parameters: dict[str, int], committed: int) -> list[int]:
    """Return the txids of the range that other runs have committed; if it has no beginning, its end at most."""
    if (first := parameters.get("from_txid", parameters.get("to_txid"))) is None:
        return []
    last = min(committed, parameters.get("to_txid", committed))
    return [txid for txid in range(first, last + 1) if txid not in outcome.txids]


def _follow(store: "StateStore", airflow: "AirflowClient", outcome: Outcome, wait_seconds: int, *, quiet: bool) -> None:
    """Follow the run, and those that go on from it, to the end. A server may be away for AWAY_SECONDS."""
    deadline = time.monotonic() + wait_seconds
    goes_on = f"Dag run {outcome.run_id} goes on without you. See: tidegate inspect {outcome.pipeline}"
    with run_progress.shown(outcome, quiet=quiet) as refresh:
        away_since: float | None = None
        has_ended = False
        while True:
            try:
                has_ended = _update(store, airflow, outcome)
                away_since = None
            except RetryableError as away:
                now = time.monotonic()
                if away_since is None:
                    away_since = now
                    output.say(f"{away} (asking again for {AWAY_SECONDS} s)")
                if now > min(deadline, away_since + AWAY_SECONDS):
                    raise type(away)(f"{away} {goes_on}") from away
            refresh()
            if has_ended:
                return
            if time.monotonic() > deadline:
                raise RunUnfinished(f"The run is still {outcome.state} after {wait_seconds} s. {goes_on}")
            time.sleep(POLL_SECONDS)


def _update(store: "StateStore", airflow: "AirflowClient", outcome: Outcome) -> bool:
    """Update the outcome if both Airflow and the ledger answer; return whether the last run of the chain has ended.

    The ledger is asked second: if Airflow says that the run has ended, the ledger knows all that it did. The next run of the
    chain was queued by the plan of this one, so it is there before this one ends.
    """
    newest = outcome.runs[-1]
    outcome.state = airflow.run_state(outcome.pipeline, newest)
    txids = store.run_txids(outcome.pipeline, newest)
    outcome.txids = sorted({*outcome.txids, *txids})
    outcome.phases |= {status.txid: status.phase for status in store.batch_statuses(outcome.pipeline, txids, len(txids) or 1)}
    if outcome.state == "success" and airflow.has_run(outcome.pipeline, following := next_run(newest)):
        outcome.runs.append(following)
        return False
    return outcome.state in FINISHED


def _check_planned(store: "StateStore", airflow: "AirflowClient", outcome: Outcome) -> None:
    """Refuse a run that has ended well without batches, unless its plan found that there is nothing to do.

    Raises: PipelinePaused if the pipeline was paused before the run began, RunUnfinished if a person has ended the run.
    """
    if outcome.state != "success" or outcome.txids:
        return
    store.check_not_paused(outcome.pipeline)
    tasks = airflow.task_instances(outcome.pipeline, outcome.run_id)
    if all(task["task_id"] != airflow.PLAN or task["state"] != "skipped" for task in tasks):
        raise RunUnfinished(
            f"Dag run {outcome.run_id} has ended before it planned anything: a person has marked it, or its plan, as done. "
            f"Start another: tidegate trigger {outcome.pipeline} --wait"
        )


def _check_committed(outcome: Outcome) -> None:
    if left_over := outcome.left_over:
        raise RunUnfinished(
            f"Airflow says that Dag run {outcome.run_id} has ended well, but {ranges(left_over)} "
            f"{'has' if len(left_over) == 1 else 'have'} not committed: a person has marked it, or tasks of it, as done. "
            f"Another run takes up what is left over: tidegate trigger {outcome.pipeline} --wait"
        )


def _failure(store: "StateStore", outcome: Outcome, failed_tasks: list[str]) -> TidegateError:
    store.check_history(outcome.pipeline)  # it may have been retired since
    (lag,), losses = store.lag([outcome.pipeline]), store.losses()
    root = why.root_causes(store, [outcome.pipeline])[outcome.pipeline].error
    tasks = ", ".join(f"{name} ({count})" for name, count in sorted(Counter(failed_tasks).items()))
    return class_of(root)(
        f"Dag run {outcome.runs[-1]} failed in {tasks or 'no task that Airflow names'}. "
        f"{outcome.pipeline} waits for {waits_for(lag, losses) or 'nothing'}. See: tidegate why {outcome.pipeline}"
    )


def _report(outcome: Outcome, as_json: bool, prepared: Prepared = UNPREPARED) -> None:
    if as_json:
        output.print_json({**prepared.facts, **asdict(outcome), "committed": outcome.committed, "skipped": outcome.skipped})
        return
    if outcome.already_committed:
        output.write(f"Already committed: {ranges(outcome.already_committed)}.")
    if outcome.state not in FINISHED:
        output.write(f"Started Dag run {outcome.run_id}. Follow it: tidegate inspect {outcome.pipeline}")
    elif not outcome.txids and not outcome.already_committed and outcome.state == "success":
        output.write("Skipped: nothing new at the source, no txid spent.")
        if message := source_report.sentence(outcome.pipeline, Settings.load()):
            output.write(message)
    elif outcome.committed:
        output.write(f"Committed: {ranges(outcome.committed)}.")
    if outcome.skipped:
        output.write(
            f"Given up and skipped, without their rows: {ranges(outcome.skipped)}. "
            f"Why: tidegate inspect {outcome.pipeline} --txid {outcome.skipped[-1]}"
        )
