"""The tasks of a pipeline's Dag: plan, and for each txid process and commit; what they record of a failure or announce.

    plan     freezes the batches of this run and passes on their txids, nothing else
    process  processes its batch, in parallel with others, up to the seal. All but the first of a run wait in the
             triggerer for a worker (`tidegate.dags.dispatch`); and any, while its pipeline's window is full, for its turn to
             begin
    commit   a sensor of Airflow, strictly ordered: it waits in the triggerer until every earlier txid has committed

Which task does the work is another matter than which one shows it, because starting a process for each costs Airflow more than
most batches take. A process task that seals the batch after the cursor commits it at once, with the sealed batches that
follow; then it goes on with batches of the run that no task has begun. A process task whose batch another one has sealed, and a
commit task whose batch has committed, end in the triggerer, without a worker.

Postgres decides about order and exactly-once, so tasks may be cleared, killed, repeated or run twice at once.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, BaseOperator, BaseSensorOperator, Param
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowSensorTimeout,
    AirflowSkipException,
    ErrorType,
    TaskDeferralTimeout,
)
from airflow.sdk.execution_time.comms import ErrorResponse, TriggerDagRun
from airflow.triggers.base import StartTriggerArgs

from tidegate.dags.batch_trigger import PROCESS, TurnTrigger
from tidegate.dags.further_batches import process_further_batches
from tidegate.dags.task_metrics import metrics_listeners
from tidegate.dags.waiting_tasks import Halt
from tidegate.jobs.engine.log_fields import about
from tidegate.jobs.engine.txid_ranges import next_run, parameters_of_next, run_before
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.attempt.attempts import AirflowTry
from tidegate.state_store.base.errors import PipelinePaused, RetryableError, TidegateError, UsageError, describe
from tidegate.state_store.commit.commit_record import Commit
from tidegate.state_store.turns.begin_attempt import Mode

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage

logger = logging.getLogger(__name__)

LARGEST = 10**15  # beyond any txid; a task that gets a number of more than 64 bits dies before its first log line


def _whole_number(title: str, description: str) -> Param:
    return Param(None, type=["integer", "null"], minimum=1, maximum=LARGEST, title=title, description=description)


PARAMS = {
    "from_txid": _whole_number(
        "From txid", "First txid of a backfill. Txids before it must have committed. Empty: start with what is left over."
    ),
    "to_txid": _whole_number("To txid", "Last txid of a backfill. Empty: as far as the source goes."),
    "max_batches": _whole_number(
        "Most batches", "At most this many batches, over all runs that go on from this one. Empty: all there are."
    ),
}


@contextmanager
def naming_the_page() -> Iterator[None]:
    """Log the command that explains an error of ours, just before Airflow logs the error."""
    try:
        yield
    except TidegateError as error:
        logger.error("%s", error.more)  # noqa: TRY400 - Airflow logs the error itself, with its traceback
        raise


@naming_the_page()
def plan(
    pipeline_name: str,
    concurrency: int,
    batches_per_run: int,
    *,
    params: Mapping[str, Any],
    run_id: str,
    dag: DAG,
    dag_run: Any,
) -> list[int]:
    """Return the txids that this run covers; with none, the whole run is skipped. If there are more, queue the next run."""
    from tidegate.jobs.engine.worker import Worker  # noqa: PLC0415 - brings pyspark

    _check_parameters(dag_run.conf or {}, dag.params)
    given = {name: None if params[name] is None else int(params[name]) for name in PARAMS}  # JSON's 3.0 is a whole number
    limit = min(given["max_batches"] or batches_per_run, batches_per_run)
    try:
        # By its name, so that the plan loads it: a module that cannot be loaded here is an error of the plan.
        with about(pipeline_name), Worker.open(Settings.load(), pipeline_name, owner=run_id) as worker:
            _check_run_before(worker.store, pipeline_name, run_id)
            txids = worker.plan(run_id, **{**given, "max_batches": limit})
            declared = worker.pipeline
    except PipelinePaused as paused:
        raise AirflowSkipException(str(paused)) from paused
    if declared.concurrency != concurrency:
        logger.warning(
            "The pipeline declares concurrency=%d, its Dag processes %d batches at once.", declared.concurrency, concurrency
        )
    if declared.tries > (most := dag.get_task(PROCESS).retries + 1):
        logger.warning(
            "The pipeline declares tries=%d, its Dag tries at most %d times: give batch_dag default_args={'retries': %d}.",
            *(declared.tries, most, declared.tries - 1),
        )
    if not txids:
        raise AirflowSkipException("Nothing to do: all batches have committed, and the source has no new data.")
    with about(pipeline_name):
        logger.info("%s: %d batches, txids %d to %d", pipeline_name, len(txids), txids[0], txids[-1])
        if (rest := parameters_of_next(given, txids, limit)) is not None:
            if dag.max_active_runs == 1:
                _queue(pipeline_name, next_run(run_id), rest)
            else:  # it would start beside this one, and find that its predecessor has not committed
                logger.warning("%s: there may be more, which a later run takes up: several runs may be active", pipeline_name)
    return txids


def _check_parameters(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Ignore parameters that a run was given and that are none, such as another scheduler's ticket.

    Raises: UsageError if one may be meant for one of ours, as the run would cover other batches than its author thinks.
    """
    for name in sorted(set(given) - set(known)):
        is_like_ours = any(word in name.lower() for word in ("tx", "batch")) or get_close_matches(name.lower(), PARAMS, 1)
        if is_like_ours:
            raise UsageError(f"Run parameter {name} is unknown. There are: {', '.join(sorted(known))}.")
        logger.info("Run parameter %s is ignored: it is none of Tidegate's, and none of the Dag's.", name)


def _check_run_before(store: StateStore, pipeline: str, run_id: str) -> None:
    """Skip a run whose predecessor has left batches over: they wait for a person, and so does the rest of the chain."""
    before = run_before(run_id)
    covered = store.run_txids(pipeline, before) if before else []
    if left_over := [txid for txid in covered if txid > store.committed(pipeline)]:
        raise AirflowSkipException(
            f"Run {before}, from which this one goes on, has not committed {pipeline} {left_over[0]}. "
            f"Why: tidegate why {pipeline} {left_over[0]}. Any new run takes up what is left over."
        )


def _queue(pipeline: str, run_id: str, parameters: dict[str, int]) -> None:
    """Queue a Dag run, unless an earlier try of this plan has done so; Airflow starts it after this one."""
    from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS  # noqa: PLC0415 - only a task that runs has it

    answer = SUPERVISOR_COMMS.send(TriggerDagRun(dag_id=pipeline, run_id=run_id, conf=parameters))
    if isinstance(answer, ErrorResponse) and answer.error != ErrorType.DAGRUN_ALREADY_EXISTS:
        raise RetryableError(f"Airflow does not queue run {run_id} of {pipeline}: {answer.error.value} {answer.detail or ''}")
    logger.info("%s: there is more; run %s goes on after this one", pipeline, run_id)


def report_failure(context: Mapping[str, Any]) -> None:
    """Record in the ledger that neither of a batch's tasks is tried any more, so that later txids stop waiting for it.

    If its pipeline's policy then gives the batch up and its turn has come, it is skipped here, because its own tasks are over;
    otherwise the commit of its predecessor skips it. A task that has waited in vain has nothing to report: the ledger knows.

    Airflow calls this after the last failure, in the task, or in the Dag processor if the task stopped sending heartbeats.
    It calls nothing for a task that is killed in its last try or marked as failed by hand: `tidegate.dags.batch_trigger` finds
    those.
    """
    from tidegate.jobs.engine.worker import Worker  # noqa: PLC0415 - brings pyspark

    ti, error = context["ti"], context.get("exception")
    if isinstance(error, WaitedInVain):
        return
    reason = describe(error) if error else f"its task was killed in try {ti.try_number}."
    with Worker.open(Settings.load(), ti.dag_id, owner=str(_try(ti)), listeners=metrics_listeners()) as worker:
        txid = worker.store.run_txids(ti.dag_id, ti.run_id)[ti.map_index]
        worker.report_exhausted(txid, reason)
        if worker.store.turn(ti.dag_id, txid).given_up:
            with about(ti.dag_id, txid):
                try:
                    logger.info("%s", worker.commit(txid))
                except RetryableError as later:
                    logger.info("%s", later)


TRIGGER = f"{TurnTrigger.__module__}.{TurnTrigger.__qualname__}"


class WaitedInVain(AirflowFailException):  # type: ignore[misc]
    """The batch's turn does not come in this run. Another try would wait for the same thing, so there is none."""


def sends_lineage() -> bool:
    """Return whether Airflow sends OpenLineage events: its provider is installed, and has a transport."""
    try:
        from airflow.providers.openlineage.conf import is_disabled  # noqa: PLC0415 - it need not be installed
    except ImportError:
        return False
    return not is_disabled()


class BatchTask:
    """A task of one batch: how its waits end, and what Airflow's OpenLineage provider asks of it."""

    template_fields = ("txid",)
    start_from_trigger = True

    def __init__(self, *, pipeline_name: str, txid: int, turn_timeout: timedelta, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.pipeline_name = pipeline_name
        self.txid = txid
        self.turn_timeout = turn_timeout

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any) -> Any:
        """Resume as Airflow does, but fail permanently with the reason if the wait took too long."""
        try:
            return super().resume_execution(next_method, next_kwargs, context)  # type: ignore[misc]
        except (TaskDeferralTimeout, AirflowSensorTimeout) as timeout:
            raise WaitedInVain(
                f"The turn did not come within {self.turn_timeout}: an earlier txid has not committed. Look with "
                f"tidegate inspect {self.pipeline_name}, then trigger the Dag again: it starts with what is left over."
            ) from timeout

    def get_openlineage_facets_on_start(self) -> "OperatorLineage":
        """Return the batch's inputs and outputs; the provider also asks for them at the end, as nothing else is defined."""
        from tidegate.dags.lineage import lineage_of  # noqa: PLC0415 - needs the provider, which need not be installed

        return lineage_of(self.pipeline_name, self.txid)


class ProcessBatch(BatchTask, BaseOperator):  # type: ignore[misc]
    """Processes a batch up to the seal, and what else of its run is left to do.

    It succeeds when its batch is sealed or was given up. A try after a failure resumes: sealed or committed work stays. After
    the task was cleared, it processes its batch again, unless that has committed.

    It starts in the triggerer, unless it is one of the first of its run, and ends there if another task has processed its
    batch. It starts in a worker with an author's time limit, which is meant for one batch, so that tasks do not take over each
    other's work; and where Airflow sends lineage, which it does in workers only.
    """

    def __init__(self, *, concurrency: int = 1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.start_from_trigger = self.execution_timeout is None and not sends_lineage()
        self.start_trigger_args = StartTriggerArgs(
            trigger_cls=TRIGGER,
            trigger_kwargs={"pipeline_name": self.pipeline_name, "awaited": "process", "concurrency": concurrency},
            next_method=self.execute_begin.__name__,
            timeout=None,  # it waits as long as the run has work
        )

    @naming_the_page()
    def execute(self, context: Any) -> None:
        """Process the batch, commit the sealed ones, then go on with batches of the run that no task has begun.

        An author's time limit is meant for one batch: with one, the task keeps to its own. It waits here for a server that is
        away: Airflow's next try would follow the clock, and begin long after the server is back.
        """
        with about(self.pipeline_name, self.txid):
            logger.info(
                "The same by hand: tidegate run %s --from-txid %d --to-txid %d", self.pipeline_name, self.txid, self.txid
            )
            ti = context["ti"]
            was_cleared = ti.try_number > 1 and tries_since_clearing(ti.try_number, ti.max_tries, self.retries) == 1
            self._execute(context, "restage" if was_cleared else "resume")

    def execute_begin(self, context: Any, event: Halt | None = None) -> None:
        """Go on when a worker, or room in the window, is there for the batch, or fail with the reason why not in this run."""
        if event and _still_halted(self.pipeline_name, self.txid, event):
            raise WaitedInVain(event["reason"])
        self.execute(context)

    def _execute(self, context: Any, mode: Mode) -> None:
        from tidegate.jobs.engine.retries import with_servers  # noqa: PLC0415 - brings pyspark

        here, settings = _try(context["ti"]), Settings.load()
        must_wait = with_servers(settings, lambda: self._process(settings, here, mode))
        if must_wait:
            trigger = TurnTrigger(self.pipeline_name, "begin")
            self.defer(trigger=trigger, timeout=self.turn_timeout, method_name=self.execute_begin.__name__)

    def _process(self, settings: Settings, here: AirflowTry, mode: Mode) -> bool:
        """Do all work that is possible now; return whether the batch must wait for its turn. Work that is done is kept."""
        from tidegate.jobs.engine.worker import Worker  # noqa: PLC0415 - brings pyspark

        name, txid = self.pipeline_name, self.txid
        with Worker.open(settings, name, owner=str(here), airflow=here, listeners=metrics_listeners()) as worker:
            if worker.has_committed(txid):
                logger.info("%s %d has committed; to find its task: tidegate inspect %s --txid %d", name, txid, name, txid)
                return False
            processed = worker.process_in_own_task(txid, mode=mode)
            if self.execution_timeout is None:
                helper = replace(here, task_id=f"{here.task_id} of txid {txid}")
                process_further_batches(replace(worker, owner=str(helper), airflow=helper), here.run_id)
            return processed.must_wait


class CommitSensor(BatchTask, BaseSensorOperator):  # type: ignore[misc]
    """Waits until every earlier txid has committed; then commits the batch, if no other task has.

    It starts in the triggerer, without a worker (`tidegate.dags.batch_trigger`), and mostly ends there. The scheduler keeps the
    timeout of the wait, so it ends the wait even if no triggerer is left.
    """

    def __init__(self, *, turn_timeout: timedelta, **arguments: Any) -> None:
        super().__init__(turn_timeout=turn_timeout, timeout=turn_timeout, **arguments)
        self.start_trigger_args = StartTriggerArgs(
            trigger_cls=TRIGGER,
            trigger_kwargs={"pipeline_name": self.pipeline_name, "awaited": "commit"},
            next_method=self.execute_complete.__name__,
            timeout=turn_timeout,
        )

    def execute(self, context: Any) -> None:
        """Commit without a wait, where Airflow starts no triggerer, as in `airflow tasks test`: in order, or not at all."""
        self.execute_complete(context)

    @naming_the_page()
    def execute_complete(self, context: Any, event: Halt | None = None) -> None:
        """Commit the batch, or find it committed; fail with the reason if its turn will not come in this run."""
        from tidegate.jobs.engine.retries import with_servers  # noqa: PLC0415 - brings pyspark
        from tidegate.jobs.engine.worker import Worker  # noqa: PLC0415

        if event:
            if _still_halted(self.pipeline_name, self.txid, event):
                raise WaitedInVain(event["reason"])
            trigger = TurnTrigger(self.pipeline_name, "commit")
            self.defer(trigger=trigger, timeout=self.turn_timeout, method_name=self.execute_complete.__name__)
        here, settings = _try(context["ti"]), Settings.load()

        def commit() -> Commit:
            with Worker.open(
                settings, self.pipeline_name, owner=str(here), airflow=here, listeners=metrics_listeners()
            ) as worker:
                return worker.commit(self.txid)

        with about(self.pipeline_name, self.txid):
            done = with_servers(settings, commit)
        with about(self.pipeline_name, self.txid, done.attempt):
            logger.info("%s", done)


class Announce(BaseOperator):  # type: ignore[misc]
    """Announces as an asset event that the run has committed batches, with their first and last txid; else it is skipped.

    It looks at the ledger when all tasks of the run have ended, so it does not matter which of them committed, or whether
    others failed. Cleared, it announces the run again.
    """

    def __init__(self, *, pipeline_name: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.pipeline_name = pipeline_name

    def execute(self, context: Any) -> None:
        """Add what was committed to the event that Airflow records when this task succeeds."""
        with StateStore.connect(Settings.load()) as store:
            txids = store.run_txids(self.pipeline_name, context["run_id"])
            committed = [
                attempt.txid
                for attempt in store.attempt_times(self.pipeline_name, txids)
                if attempt.committed_at is not None and attempt.skipped_reason is None
            ]
        if not committed:
            raise AirflowSkipException("This run has committed nothing.")
        for asset in self.outlets:
            context["outlet_events"][asset].extra.update(first_txid=committed[0], last_txid=committed[-1])


def _still_halted(pipeline: str, txid: int, halt: Halt) -> bool:
    """Return whether the ledger says now what ended a wait: since then, the task has waited for a worker."""
    with StateStore.connect(Settings.load()) as store:
        if (waits_for := halt["waits_for"]) is None:
            return store.turn(pipeline, txid).halted is not None
        return store.committed(pipeline) < waits_for


def tries_since_clearing(try_number: int, max_tries: int, retries: int) -> int:
    """Return how many tries a task has had since it was cleared: at that moment, Airflow allows `retries` more."""
    return try_number - (max_tries - retries)


def _try(ti: Any) -> AirflowTry:
    return AirflowTry(ti.run_id, ti.task_id, ti.try_number)
