"""One Dag per pipeline, from one factory: tasks, priorities, retries and their pauses, how long a task waits for its turn.

    plan -> batch, once per txid: process, commit; and, if other Dags are to follow, -> announce

`tidegate.dags.batch_tasks` has the tasks. Both of a batch are named after its txid in Airflow (`tidegate.airflow_policy`), and
wait from the plan on: commit waits for what the ledger says, not for process. An arrow between them would make Airflow's
scheduler ask for each batch that waits, in each of its loops, whether its process task is over; with some hundred of them, all
Dags wait for that.

If one txid fails, later ones are processed as far as the window goes, and earlier ones commit; the later ones' commit tasks
then fail with the reason. The next run starts with the txids that are left over. A txid that was given up stops no other: in
its turn, a commit without its rows takes its place.

Importing this module loads no pyspark: the tasks import `tidegate.jobs.engine`, which does, only when they run.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, Asset, RetryPolicy, task, task_group
from airflow.sdk.definitions.retry_policy import RetryDecision

from tidegate.dags.batch_tasks import PARAMS, Announce, CommitSensor, ProcessBatch, plan, report_failure, tries_since_clearing
from tidegate.dags.batch_trigger import BATCH
from tidegate.jobs.engine.poison import pause_after
from tidegate.jobs.engine.txid_ranges import BATCHES_PER_RUN, MAX_BATCHES_PER_RUN
from tidegate.jobs.pipeline import LONGEST_RETRY_PAUSE_SECONDS, Retry
from tidegate.jobs.registry import choice, find_pipeline, folder, has_pipeline, pipeline_names
from tidegate.state_store.base.errors import DeclarationInvalid, PermanentError, UnknownPipeline

# For a task that was killed: the scheduler, which tries it again, does not load pipelines. By default the pauses are some five
# minutes in all, enough for a restart of Postgres or Spark.
TASK_DEFAULTS: dict[str, Any] = {
    "retries": Retry.tries - 1,
    "retry_delay": timedelta(seconds=Retry.delay_seconds),
    "retry_exponential_backoff": 2,
    "max_retry_delay": timedelta(seconds=LONGEST_RETRY_PAUSE_SECONDS),
}

# All absolute: by default Airflow adds the priorities of the tasks that come after, so that process would go before commit. A
# plan is short, and a pipeline that has just begun should not wait behind others' batches.
PLAN_PRIORITY, PROCESS_PRIORITY, COMMIT_PRIORITY = 2000, 1, 1000

DAG_DOC = """\
Runs pipeline **{name}**: each batch of new data gets a txid, is processed by Spark, and commits into Postgres in txid order,
exactly once.

**Run it**: trigger it, here or with `tidegate trigger {name} --wait`. Batches that an earlier run left over come first, then
the source's new data. With nothing to do, all tasks are skipped.

**Backfill**: give *From txid* and *To txid*, or `tidegate backfill {name} --from-txid A --to-txid B`. Committed batches are
left alone.

**If a task is red**: its log says in one line what is wrong: with the batch if it is a *process* task, with the states or an
earlier batch if it is a *commit* task. Fix it and trigger the Dag again, or `tidegate retry {name}`. Nothing has to be
cleared, and clearing any task, or running it twice, is harmless. If a batch cannot be fixed, give it up with
`tidegate skip {name} TXID --reason "..." --yes`; later batches then commit without its rows.

**Bad records** are set aside if the pipeline says `on_poison="quarantine"`: `tidegate quarantine list {name}`, corrected with
`tidegate quarantine mend {name} TXID NUMBER --reason ...`, and back with `tidegate quarantine replay {name} --reason ...`.

**Stop it**: `tidegate pause {name} --reason ...` skips new runs, however they are started, until `tidegate resume {name}`;
batches that have begun commit, and planned ones wait.

**Look inside**: `tidegate inspect {name}`. A task that has finished its batch goes on with others of the run; to find the task
whose log has a batch: `tidegate inspect {name} --txid TXID`.
"""
PLAN_DOC = "Decides which txids this run covers and freezes what each of them will read. Repeating it changes nothing."
PROCESS_DOC = (
    "Spark reads the batch's frozen slice, aggregates it per key and stages the result; green once that is sealed. Then the "
    "task does the same for other batches that no task has begun, whose own tasks end without a worker, and commits what is "
    "ready. "
    "Deferred: it waits, without a worker, until it gets one, or another task has processed its batch; or until the pipeline's "
    "window has room. Cleared, it processes the batch again, unless that has committed."
)
COMMIT_DOC = (
    "Deferred: it waits, without a worker, until every earlier txid has committed. Then the staged result is merged into the "
    "state tables, in one transaction, mostly by a process task; green once that has happened. Repeating it changes nothing."
)
ANNOUNCE_DOC = (
    "Green: the run has committed batches, and Dags that are scheduled on {asset} start. Skipped: it has committed none. It "
    "runs last, also if tasks failed, and its own state does not count for the run's."
)


class PipelineRetries(RetryPolicy):  # type: ignore[misc]
    """Decides in the task that has failed whether and when it is tried again, as the pipeline declares it."""

    def __init__(self, pipeline_name: str) -> None:
        self._pipeline_name = pipeline_name

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Mapping[str, Any] | None = None
    ) -> RetryDecision:
        """Return the decision. Airflow bounds the number of tries by the task's `retries`, too."""
        if isinstance(exception, PermanentError):
            return RetryDecision.fail("A person has to look; trying again cannot help.")
        failures = tries_since_clearing(try_number, max_tries, context["task"].retries) if context else try_number
        pause = pause_after(exception, find_pipeline(self._pipeline_name), failures)
        if pause is None:
            return RetryDecision.fail(f"Try {failures} was the last: the pipeline declares no more.")
        return RetryDecision.retry(timedelta(seconds=pause))


def asset_of(pipeline_name: str) -> Asset:
    """Return the asset that stands for all states of a pipeline: they advance together, in one transaction."""
    return Asset(f"tidegate://pipelines/{pipeline_name}")


def batch_dag(
    pipeline_name: str,
    *,
    schedule: Any = None,
    concurrency: int = 4,
    batches_per_run: int = BATCHES_PER_RUN,
    turn_timeout: timedelta = timedelta(days=7),
    announce: bool = False,
    default_args: Mapping[str, Any] | None = None,
    tags: tuple[str, ...] = (),
    **dag_arguments: Any,
) -> DAG:
    """Return the Dag that runs one pipeline; the pipeline itself is not imported.

    `concurrency` is how many batches a run processes at once; plan warns if the pipeline declares another number.
    `batches_per_run` is how many batches one run covers at most: if there are more, its plan queues a run that goes on after
    it (`tidegate.jobs.engine.txid_ranges`), so that other Dags get their turns. `turn_timeout`, counted from the plan, ends
    waits that nothing else ended. With `announce`, each run that has committed something ends with an event of the asset
    ``tidegate://pipelines/NAME``, on which other Dags can be scheduled; that costs one more task per run.

    A failed task is tried again as its pipeline says (`tries`, `retry_delay_seconds`), but at most `retries` times: with more
    than six tries, give `default_args` that number, too.

    All other arguments are the Dag's own; with an `execution_timeout` among `default_args`, a task keeps to its own batch
    instead of going on with others. More than one active run is safe, but each would cover the same left-over batches, and
    wait for the other's attempts, so runs queue by default. Callbacks for failures, of the Dag or among `default_args`, are
    called besides the factory's own, which notes the failure in the ledger (docs/alerts.md).

    Raises: UnknownPipeline with the existing names, DeclarationInvalid.
    """
    _check_exists(pipeline_name)
    if not 1 <= batches_per_run <= MAX_BATCHES_PER_RUN:
        raise DeclarationInvalid(
            f"The Dag of {pipeline_name} has batches_per_run={batches_per_run}: it has to be from 1 to {MAX_BATCHES_PER_RUN}."
        )
    if concurrency < 1:
        raise DeclarationInvalid(
            f"The Dag of {pipeline_name} has concurrency={concurrency}: it must be at least 1, or its runs would never end."
        )
    if not isinstance(turn_timeout, timedelta):  # Airflow would only say that it cannot write the Dag down
        raise DeclarationInvalid(f"The Dag of {pipeline_name} has turn_timeout={turn_timeout!r}: it has to be a timedelta.")
    arguments: dict[str, Any] = {
        "description": f"Exactly-once batches of {pipeline_name}, committed in txid order",
        "doc_md": DAG_DOC.format(name=pipeline_name),
        "start_date": datetime(2024, 1, 1, tzinfo=UTC),  # a schedule without one never runs
        "catchup": False,  # the ledger knows what is missing, not the calendar
        "max_active_runs": 1,
        "max_active_tasks": concurrency,  # a limit of each task would count the deferred too
        **dag_arguments,
    }
    # Runs that are active at once have no order, so none can go on where another ends.
    limit = batches_per_run if arguments["max_active_runs"] == 1 else MAX_BATCHES_PER_RUN
    arguments["params"] = {**PARAMS, **arguments.get("params", {})}
    defaults = TASK_DEFAULTS | {"retry_policy": PipelineRetries(pipeline_name)} | dict(default_args or {})
    with DAG(pipeline_name, schedule=schedule, default_args=defaults, tags=["tidegate", *tags], **arguments) as dag:
        first: dict[str, Any] = {"weight_rule": "absolute", "priority_weight": PLAN_PRIORITY}
        planned = task(task_id="plan", doc_md=PLAN_DOC, **first)(plan)(pipeline_name, concurrency, limit)

        shared: dict[str, Any] = {
            "pipeline_name": pipeline_name,
            "turn_timeout": turn_timeout,
            "map_index_template": "txid {{ task.txid }}",
            "on_failure_callback": [report_failure, *_callbacks(defaults.get("on_failure_callback"))],
        }

        @task_group(group_id=BATCH)  # type: ignore[untyped-decorator]
        def batch(txid: int) -> None:
            ProcessBatch(
                task_id="process",
                doc_md=PROCESS_DOC,
                txid=txid,
                concurrency=concurrency,
                weight_rule="absolute",
                priority_weight=defaults.get("priority_weight", PROCESS_PRIORITY),
                **shared,
            )
            CommitSensor(
                task_id="commit",
                doc_md=COMMIT_DOC,
                txid=txid,
                execution_timeout=None,  # the author's is meant for one batch's processing, and would end the wait
                weight_rule="absolute",
                priority_weight=COMMIT_PRIORITY,
                **shared,
            )

        batches = batch.expand(txid=planned)
        if announce:
            asset = asset_of(pipeline_name)
            doc = ANNOUNCE_DOC.format(asset=asset.uri)
            # A teardown waits for all, runs after failures too, and leaves the run's state to the tasks before it.
            batches >> Announce(task_id="announce", pipeline_name=pipeline_name, outlets=[asset], doc_md=doc).as_teardown()
    return dag


def _callbacks(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _check_exists(pipeline_name: str) -> None:
    """Refuse a name without a pipeline, importing none."""
    if not has_pipeline(pipeline_name):
        raise UnknownPipeline(
            f"There is no pipeline {pipeline_name}: no {pipeline_name}.py in {folder()} and no entry point of that name in "
            f"group tidegate.pipelines. {choice(pipeline_name, pipeline_names())}"
        )
