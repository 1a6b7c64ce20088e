"""One Dag per pipeline, from one factory.

    plan -> batch, once per txid

plan freezes the batches of this run and passes on their txids, nothing else. A batch task goes through both phases:

- It processes its batch, in parallel with the other tasks that its Dag allows. The task that seals the batch after the cursor
  commits it at once, with the sealed batches that follow.
- Then it goes on with batches of the run that no task has begun: starting a process for each costs Airflow more than most
  batches take. A task that starts later finds its batch committed.
- If its own batch has not committed then, it stays for a while if only commits are missing (`jobs.engine.committing`); then it
  waits for its turn in the triggerer (`dags.turn_trigger`), without a worker, and mostly ends there; otherwise a worker commits
  the batch, in one Postgres transaction.
- If the pipeline's window is full when it starts, it waits in the triggerer too, until there is room.

If one txid fails, later ones are processed as far as the window goes, and earlier ones commit; the later ones then fail with
the reason. The next run starts with the txids that are left over. A txid that was given up stops no other: in its turn, a
commit without its rows takes its place.

Airflow decides only when tasks run. Postgres decides about order and exactly-once, so tasks may be cleared, killed, repeated
or run twice at once; at worst they find the work done.

Importing this module loads no pyspark: it imports `jobs.engine`, which does, only when a task runs.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, BaseOperator, ExceptionRetryPolicy, Param, RetryRule, task
from airflow.sdk.definitions.retry_policy import RetryAction
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException, TaskDeferralTimeout

from dags.turn_trigger import BATCH, Awaited, TurnTrigger
from jobs.registry import has_pipeline, pipeline_names
from state_store import Settings
from state_store.attempts import AirflowTry
from state_store.commits import Commit
from state_store.errors import (
    AttemptFenced,
    PipelinePaused,
    RetryableError,
    TidegateError,
    UnknownPipeline,
    UsageError,
)

logger = logging.getLogger(__name__)

# The one place where our errors become Airflow's decisions. An error that is not permanent is tried again after 5 to 10 s, then
# twice as long each time: some five minutes in all, enough for a restart of Postgres or Spark.
TASK_DEFAULTS: dict[str, Any] = {
    "retries": 5,
    "retry_delay": timedelta(seconds=5),
    "retry_exponential_backoff": 2,
    "max_retry_delay": timedelta(minutes=2),
    "retry_policy": ExceptionRetryPolicy(
        [
            RetryRule(
                exception="state_store.errors.PermanentError",
                action=RetryAction.FAIL,
                reason="A person has to look; trying again cannot help.",
            )
        ]
    ),
}

LARGEST = 10**15  # beyond any txid; a task that gets a number of more than 64 bits dies before its first log line
PARAMS = {
    "from_txid": Param(
        None,
        type=["integer", "null"],
        minimum=1,
        maximum=LARGEST,
        title="From txid",
        description="First txid of a backfill. Txids before it must have committed. Empty: start with what is left over.",
    ),
    "to_txid": Param(
        None,
        type=["integer", "null"],
        minimum=1,
        maximum=LARGEST,
        title="To txid",
        description="Last txid of a backfill. Empty: as far as the source goes.",
    ),
    "max_batches": Param(
        None,
        type=["integer", "null"],
        minimum=1,
        maximum=LARGEST,
        title="Most batches",
        description="At most this many batches in this run. Empty: all there are, up to 1000.",
    ),
}

DAG_DOC = """\
Runs pipeline **{name}**: each batch of new data gets a txid, is processed by Spark, and commits into Postgres in txid order,
exactly once.

**Run it**: trigger it, here or with `tidegate trigger {name} --wait`. Batches that an earlier run left over come first, then
the source's new data. With nothing to do, all tasks are skipped.

**Backfill**: give *From txid* and *To txid*, or `tidegate backfill {name} --from-txid A --to-txid B`. Committed batches are
left alone.

**If a task is red**: its log says in one line what is wrong. Fix it and trigger the Dag again, or `tidegate retry {name}`.
Nothing has to be cleared, and clearing any task, or running it twice, is harmless. If a batch cannot be fixed, give it up with
`tidegate skip {name} TXID --reason ...`; later batches then commit without its rows.

**Bad records** are set aside if the pipeline says `on_poison="quarantine"`: `tidegate quarantine list {name}`, and back with
`tidegate quarantine replay {name} --reason ...`.

**Stop it**: `tidegate pause {name} --reason ...` skips new runs, however they are started, until `tidegate resume {name}`;
planned batches go on.

**Look inside**: `tidegate inspect {name}`. A task that has finished its batch goes on with others of the run; to find the task
whose log has a batch: `tidegate inspect {name} --txid TXID`.
"""
PLAN_DOC = "Decides which txids this run covers and freezes what each of them will read. Repeating it changes nothing."
BATCH_DOC = (
    "Running: Spark reads the batch's frozen slice, aggregates it per key and stages the result; then the task does the same "
    "for other batches that no task has begun, whose own tasks find the work done; then it stays for up to half a minute while "
    "only commits are missing. Deferred: it waits, without a worker, for its turn to commit: until every earlier txid has "
    "committed. Then the staged result is merged into the state tables, in one transaction. While the pipeline's window is "
    "full, it waits in the same way for its turn to begin. Repeating any of it changes nothing."
)


def batch_dag(
    pipeline_name: str,
    *,
    schedule: Any = None,
    concurrency: int = 4,
    turn_timeout: timedelta = timedelta(hours=6),
    default_args: Mapping[str, Any] | None = None,
    tags: tuple[str, ...] = (),
    **dag_arguments: Any,
) -> DAG:
    """Return the Dag that runs one pipeline; the pipeline itself is not imported.

    `concurrency` is how many batches a run processes at once; plan warns if the pipeline declares another number.
    `turn_timeout` ends a wait that nothing else ended. All other arguments are the Dag's own; with an `execution_timeout` among
    `default_args`, a task keeps to its own batch instead of going on with others. More than one active run is safe, but each
    would process the same left-over batches, all but one in vain, so runs queue by default.

    Raises: UnknownPipeline with the existing names.
    """
    _check_exists(pipeline_name)
    arguments: dict[str, Any] = {
        "description": f"Exactly-once batches of {pipeline_name}, committed in txid order",
        "doc_md": DAG_DOC.format(name=pipeline_name),
        "start_date": datetime(2024, 1, 1, tzinfo=UTC),  # a schedule without one never runs
        "catchup": False,  # the ledger knows what is missing, not the calendar
        "max_active_runs": 1,
        "max_active_tasks": concurrency,  # not a limit of the batch task: Airflow would count the deferred too
        **dag_arguments,
    }
    arguments["params"] = {**PARAMS, **arguments.get("params", {})}
    with DAG(
        pipeline_name,
        schedule=schedule,
        default_args=TASK_DEFAULTS | dict(default_args or {}),
        tags=["tidegate", *tags],
        **arguments,
    ) as dag:
        planned = task(task_id="plan", doc_md=PLAN_DOC)(plan)(pipeline_name, concurrency)

        BatchOperator.partial(
            task_id=BATCH,
            doc_md=BATCH_DOC,
            pipeline_name=pipeline_name,
            turn_timeout=turn_timeout,
            map_index_template="txid {{ task.txid }}",
            on_failure_callback=report_failure,
        ).expand(txid=planned)
    return dag


def plan(pipeline_name: str, concurrency: int, *, params: Mapping[str, Any], run_id: str, dag: DAG, dag_run: Any) -> list[int]:
    """Return the txids that this run covers; with none, the whole run is skipped."""
    from jobs.engine.worker import Worker  # noqa: PLC0415 - brings pyspark
    from jobs.registry import find_pipeline  # noqa: PLC0415

    if unknown := sorted(set(dag_run.conf or {}) - set(dag.params)):
        raise UsageError(f"Run parameter {', '.join(unknown)} is unknown. There are: {', '.join(sorted(dag.params))}.")
    declared = find_pipeline(pipeline_name)
    if declared.concurrency != concurrency:
        logger.warning(
            "The pipeline declares concurrency=%d, its Dag processes %d batches at once.", declared.concurrency, concurrency
        )
    if declared.tries != (tries := dag.get_task(BATCH).retries + 1):
        logger.warning(
            "The pipeline declares tries=%d, its Dag tries %d times: give batch_dag default_args={'retries': %d}.",
            *(declared.tries, tries, declared.tries - 1),
        )
    given = {name: params[name] for name in PARAMS}
    try:
        with Worker.open(Settings.load(), declared, owner=run_id) as worker:
            txids = worker.plan(run_id, **given)
    except PipelinePaused as paused:
        raise AirflowSkipException(str(paused)) from paused
    if not txids:
        raise AirflowSkipException("Nothing to do: all batches have committed, and the source has no new data.")
    logger.info("%s: %d batches, txids %d to %d", pipeline_name, len(txids), txids[0], txids[-1])
    return txids


def report_failure(context: Mapping[str, Any]) -> None:
    """Record in the ledger that no task retries the batch any more, so that later txids stop waiting for it.

    If its pipeline's policy then gives the batch up and its turn has come, it is skipped here, because its own task is over;
    otherwise the commit of its predecessor skips it. A task that has waited in vain has nothing to report: the ledger knows.

    Airflow calls this after the last failure, in the task, or in the Dag processor if the task stopped sending heartbeats.
    It calls nothing for a task that is killed in its last try or marked as failed by hand: `dags.turn_trigger` finds those.
    """
    from jobs.engine.worker import Worker  # noqa: PLC0415 - brings pyspark

    ti, error = context["ti"], context.get("exception")
    if isinstance(error, WaitedInVain):
        return
    if isinstance(error, TidegateError):
        reason = f"{error.code}: {error}"
    elif error:
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = f"its task was killed in try {ti.try_number}."
    with Worker.open(Settings.load(), ti.dag_id, owner=str(_try(ti))) as worker:
        txid = worker.store.run_txids(ti.dag_id, ti.run_id)[ti.map_index]
        worker.report_exhausted(txid, reason)
        if worker.store.turn(ti.dag_id, txid).given_up:
            try:
                logger.info("%s", worker.commit(txid))
            except RetryableError as later:
                logger.info("%s", later)


class WaitedInVain(AirflowFailException):  # type: ignore[misc]
    """The batch's turn does not come in this run. Another try would wait for the same thing, so there is none."""


class BatchOperator(BaseOperator):  # type: ignore[misc]
    """Processes one batch, then waits in the triggerer for its turn, unless it has committed by then, and commits it.

    A try after a failure, in either phase, begins with processing, which finds sealed or committed work. The scheduler keeps
    the timeout of the wait, so it ends the wait even if no triggerer is left.
    """

    def __init__(self, *, pipeline_name: str, txid: int, turn_timeout: timedelta, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.pipeline_name = pipeline_name
        self.txid = txid
        self.turn_timeout = turn_timeout

    def execute(self, context: Any) -> None:
        """Process the batch, commit the sealed ones, then go on with batches of the run that no task has begun.

        A batch that another attempt has taken over is left to it. If only commits are missing then, the task stays for a while.
        The author's time limit is meant for one batch. It waits here for a server that is away: Airflow's next try would follow
        the clock, and begin long after the server is back.
        """
        logger.info("The same by hand: tidegate run %s --from-txid %d --to-txid %d", self.pipeline_name, self.txid, self.txid)
        self._execute(context)

    def execute_begin(self, context: Any, event: str | None = None) -> None:
        """Go on when the window has room for the batch, or fail with the reason why it will not in this run."""
        if event:
            raise WaitedInVain(event)
        self._execute(context)

    def _execute(self, context: Any) -> None:
        from jobs.engine.recovery import with_servers  # noqa: PLC0415 - brings pyspark

        here, settings = _try(context["ti"]), Settings.load()
        awaited = with_servers(settings, lambda: self._process(settings, here))
        if awaited is None:
            return
        trigger = TurnTrigger(self.pipeline_name, here.run_id, self.txid, awaited)
        method = self.execute_begin if awaited == "begin" else self.execute_complete
        self.defer(trigger=trigger, timeout=self.turn_timeout, method_name=method.__name__)

    def _process(self, settings: Settings, here: AirflowTry) -> Awaited | None:
        """Do all work that is possible now; return the turn that the batch awaits, None if it has committed. Work is kept."""
        from jobs.engine.worker import Worker  # noqa: PLC0415 - brings pyspark

        name, txid = self.pipeline_name, self.txid
        with Worker.open(settings, name, owner=str(here), airflow=here) as worker:
            if worker.has_committed(txid):
                logger.info("%s %d has committed; to find its task: tidegate inspect %s --txid %d", name, txid, name, txid)
                return None
            worker.await_claimant(txid)
            is_ahead = False
            try:
                processed = worker.process_and_commit(txid)
                logger.info("%s", processed)
                is_ahead = processed.is_ahead
            except AttemptFenced as fenced:
                logger.warning("%s", fenced)
            if self.execution_timeout is None:
                helper = replace(here, task_id=f"{here.task_id} of txid {txid}")
                replace(worker, owner=str(helper), airflow=helper).process_claimed(here.run_id)
            if is_ahead:
                return "begin"
            if self.execution_timeout is None:
                has_committed = worker.wait_while_only_commits_remain(txid)
            else:
                has_committed = worker.has_committed(txid)
            return None if has_committed else "commit"

    def execute_complete(self, context: Any, event: str | None = None) -> None:
        """Commit the batch, or find it committed; fail with the reason if its turn will not come in this run."""
        from jobs.engine.recovery import with_servers  # noqa: PLC0415 - brings pyspark

        if event:
            raise WaitedInVain(event)
        here, settings = _try(context["ti"]), Settings.load()
        logger.info("%s", with_servers(settings, lambda: self._commit(settings, here)))

    def _commit(self, settings: Settings, here: AirflowTry) -> Commit:
        from jobs.engine.worker import Worker  # noqa: PLC0415 - brings pyspark

        with Worker.open(settings, self.pipeline_name, owner=str(here), airflow=here) as worker:
            return worker.commit(self.txid)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any) -> Any:
        """Resume as Airflow does, but fail permanently with the reason if the wait took too long."""
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout as timeout:
            raise WaitedInVain(
                f"The turn did not come within {self.turn_timeout}: an earlier txid has not committed. Look with "
                f"tidegate inspect {self.pipeline_name}, then trigger the Dag again: it starts with what is left over."
            ) from timeout


def _check_exists(pipeline_name: str) -> None:
    """Refuse a name without a pipeline, importing none."""
    if not has_pipeline(pipeline_name):
        raise UnknownPipeline(
            f"There is no pipeline {pipeline_name}: no jobs/pipelines/{pipeline_name}.py and no entry point of that name in "
            f"group tidegate.pipelines. Pipelines: {', '.join(pipeline_names()) or 'none'}.",
            pipeline=pipeline_name,
        )


def _try(ti: Any) -> AirflowTry:
    return AirflowTry(ti.run_id, ti.task_id, ti.try_number)
