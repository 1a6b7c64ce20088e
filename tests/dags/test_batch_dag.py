"""Every Dag has the promised shape, starts as many tasks as it may, and turns our errors into the right decision."""

import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import BaseSensorOperator
from airflow.sdk.definitions.retry_policy import RetryAction
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException, TaskDeferred
from airflow.serialization.serialized_objects import DagSerialization

import tidegate.jobs.pipelines
from tests.batches import Batches
from tests.dags.conftest import CLICKS
from tests.store import WINDOW, Tracked, errors
from tidegate import airflow_policy
from tidegate.dags import batch_dag, batch_tasks
from tidegate.dags.batch_tasks import CommitSensor, ProcessBatch
from tidegate.dags.batch_trigger import BATCH, COMMIT, PROCESS
from tidegate.dags.waiting_tasks import Halt
from tidegate.jobs.engine.processing import Processor
from tidegate.state_store import Settings

DECLARED = """
from dataclasses import replace
from tests.dags.conftest import CLICKS
PIPELINE = replace(CLICKS, {})
"""


@pytest.mark.promise("decision:0006", "decision:0026", "performance:commit-waits-beside-process-not-after-it")
def test_a_batch_is_processed_then_committed_by_an_ordered_sensor() -> None:
    serialized = DagSerialization.from_dict(DagSerialization.to_dict(batch_dag.batch_dag("flights", announce=True)))
    assert serialized.max_active_runs == 1
    found = {task.task_id: task.downstream_task_ids for task in serialized.tasks}
    assert found == {"plan": {PROCESS, COMMIT}, PROCESS: {"announce"}, COMMIT: {"announce"}, "announce": set()}
    announce = serialized.get_task("announce")  # as a teardown it runs after failures too, and does not decide about the run
    assert (announce.is_teardown, announce.on_failure_fail_dagrun) == (True, False)
    assert issubclass(CommitSensor, BaseSensorOperator)
    weights = {task.task_id: task.weight_rule.get_weight(SimpleNamespace(task=task)) for task in serialized.tasks}
    assert weights["plan"] > weights[COMMIT] > weights[PROCESS]
    for task in (serialized.get_task(PROCESS), serialized.get_task(COMMIT)):
        assert (task.get_closest_mapped_task_group().group_id, task.start_from_trigger) == (BATCH, True)


@pytest.mark.promise("decision:0025")
def test_an_author_may_set_any_argument_of_a_dag(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(context: Any) -> None:
        """Call a person."""

    usual = {"retries": 1, "owner": "ops", "execution_timeout": timedelta(minutes=5), "on_failure_callback": theirs}
    given = {"schedule": "@hourly", "tags": ("nightly",), "max_active_runs": 2, "default_args": usual}
    dag = batch_dag.batch_dag("flights", concurrency=7, **given)
    assert (dag.tags, dag.max_active_runs, dag.catchup) == ({"tidegate", "nightly"}, 2, False)
    assert dag.start_date is not None
    assert [(task.retries, task.owner) for task in dag.tasks] == [(1, "ops")] * 3
    assert [task.on_failure_callback for task in dag.tasks[1:]] == [[batch_tasks.report_failure, theirs]] * 2
    # Batches that wait for their turn must not keep others from being processed: a limit of the task would count them.
    assert dag.max_active_tasks == 7
    assert {(task.max_active_tis_per_dag, task.max_active_tis_per_dagrun) for task in dag.tasks} == {(None, None)}
    # With a limit, a task is kept to its own batch, so it starts in a worker; one that bounds the wait for a turn would end it.
    process, commit = dag.get_task(PROCESS), dag.get_task(COMMIT)
    assert (process.start_from_trigger, commit.start_from_trigger) == (False, True)
    assert (process.execution_timeout, commit.execution_timeout) == (timedelta(minutes=5), None)
    # The triggerer runs no listeners of Airflow: a batch whose task ends there would be missing from its lineage.
    assert batch_dag.batch_dag("flights").get_task(PROCESS).start_from_trigger
    monkeypatch.setenv("AIRFLOW__OPENLINEAGE__TRANSPORT", '{"type": "console"}')
    assert not batch_dag.batch_dag("flights").get_task(PROCESS).start_from_trigger
    for name, value in {"concurrency": 0, "batches_per_run": 0, "turn_timeout": 3600}.items():
        with pytest.raises(errors.DeclarationInvalid, match=f"{name}={value}"):
            batch_dag.batch_dag("flights", **{name: value})


@pytest.mark.promise("limit:Pipeline.tries")
@pytest.mark.usefixtures("clicks")
def test_a_task_is_tried_as_often_as_its_pipeline_says() -> None:
    def pauses(error: Exception, *tries: int, max_tries: int = 5) -> list[float | None]:
        task = batch_dag.batch_dag("clicks").get_task(PROCESS)
        decided = [task.retry_policy.evaluate(error, number, max_tries, {"task": task}) for number in tries]
        assert [one.action is RetryAction.RETRY for one in decided] == [one.retry_delay is not None for one in decided]
        return [one.retry_delay and one.retry_delay.total_seconds() for one in decided]

    assert pauses(OSError("gone"), 1, 2, 3) == [5, 10, None]
    assert pauses(OSError("gone"), 5, 6, 7, max_tries=9) == [5, 10, None]
    assert pauses(errors.BatchRetried("try 1 of 3 failed"), 3) == [10]
    assert pauses(errors.GuardMismatch("txid 9 is ahead"), 1) == [None]


def test_a_misspelt_run_parameter_is_refused_as_the_run_would_take_everything() -> None:
    flights = batch_dag.batch_dag("flights")
    for name in ("max_batch", "txid", "from_tx", "From-Txid", "batchsize", "from"):
        run = SimpleNamespace(conf={name: 3})
        with pytest.raises(errors.UsageError, match=rf"{name} is unknown\. There are: from_txid, max_batches, to_txid"):
            batch_tasks.plan("flights", 4, 9, params={}, run_id="run", dag=flights, dag_run=run)


@pytest.fixture
def clicks(settings: Settings, batches: Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batches:
    """Pipeline clicks, found by its name as in a task of its Dag; it skips poison."""
    monkeypatch.setattr(Settings, "load", lambda: settings)
    (tmp_path / "clicks.py").write_text(DECLARED.format('on_poison="skip", tries=3'))
    monkeypatch.setattr(tidegate.jobs.pipelines, "__path__", [*tidegate.jobs.pipelines.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tidegate.jobs.pipelines.clicks", raising=False)
    return batches


def _context(map_index: int = 1, **arguments: Any) -> dict[str, Any]:
    """Return the context of a process task: its last try, if nothing else is said."""
    found = {"task_id": PROCESS, "try_number": 6, "max_tries": 5, **arguments}
    return {"ti": SimpleNamespace(dag_id=CLICKS.name, run_id="run", map_index=map_index, **found)}


def _plan(*, concurrency: int = 4, batches_per_run: int = 9, run_id: str = "run", active: int = 1, **given: float) -> list[int]:
    params, dag = {**dict.fromkeys(batch_tasks.PARAMS), **given}, batch_dag.batch_dag("clicks", max_active_runs=active)
    run = SimpleNamespace(conf={})
    return batch_tasks.plan(CLICKS.name, concurrency, batches_per_run, params=params, run_id=run_id, dag=dag, dag_run=run)


def _process(txid: int, **arguments: Any) -> ProcessBatch:
    limit = timedelta(hours=6)
    return ProcessBatch(task_id=PROCESS, pipeline_name=CLICKS.name, txid=txid, turn_timeout=limit, retries=5, **arguments)


def _phases(batches: Batches) -> list[tuple[int, str]]:
    return [(batch.txid, batch.phase) for batch in batches.store.batch_statuses(CLICKS.name)]


@pytest.mark.promise("limit:Pipeline.tries")
def test_a_batch_is_given_up_by_what_its_content_did_however_its_last_task_ended(clicks: Batches) -> None:
    clicks.plan("run", 3)
    for txid, tries in ((1, 3), (2, 1), (3, 3)):
        for _ in range(tries):
            clicks.store.fail_attempt(clicks.begin(txid), "MALFORMED_RECORD: a.csv, line 3.", is_poison=True)
    clicks.store.fail_attempt(clicks.begin(3), "SPARK_UNAVAILABLE: gone", is_poison=False)
    for position in range(3):
        batch_tasks.report_failure({**_context(position), "exception": None})
    assert _phases(clicks) == [(1, "skipped"), (2, "halted"), (3, "halted")]


@pytest.mark.parametrize("waits_for", [None, 1], ids=["a halt", "a task that was marked by hand"])
@pytest.mark.parametrize("kind", ["process", "commit"])
@pytest.mark.usefixtures("without_spark")
def test_a_wait_that_ended_in_vain_asks_the_ledger_again_before_it_fails(
    clicks: Batches, kind: str, waits_for: int | None
) -> None:
    """A worker may come to it minutes later; by then, what it waited for may have committed, or was retried."""
    clicks.plan("run", 3)
    if waits_for is None:
        clicks.store.halt_batch(CLICKS.name, 1, "a person has to look")
    commit = CommitSensor(task_id=COMMIT, pipeline_name=CLICKS.name, txid=2, turn_timeout=timedelta(hours=6))
    task, method = (_process(2), "execute_begin") if kind == "process" else (commit, "execute_complete")
    event = Halt(reason="clicks 2 will not commit in this run", waits_for=waits_for)
    context = _context()
    with pytest.raises(batch_tasks.WaitedInVain, match="clicks 2 will not commit in this run") as waited:
        task.resume_execution(method, {"event": event}, context)
    batch_tasks.report_failure({**context, "exception": waited.value})
    # The ledger has the reason for the earlier batch: a halt of its own would keep this one from going on later.
    assert clicks.store.batch_history(CLICKS.name, 2).status.phase == "planned"

    clicks.seal(1)
    clicks.commit(1)
    if kind == "process":
        task.resume_execution(method, {"event": event}, context)
        assert _phases(clicks)[1] == (2, "committed")
    else:
        with pytest.raises(TaskDeferred) as again:
            task.resume_execution(method, {"event": event}, context)
        assert again.value.trigger.awaited == "commit"
        assert _phases(clicks)[1] == (2, "planned")


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, int]]]:
    """Collect the runs that plans queue: Airflow itself does so in tests/end_to_end."""
    found: list[tuple[str, dict[str, int]]] = []
    monkeypatch.setattr(batch_tasks, "_queue", lambda _pipeline, run_id, parameters: found.append((run_id, parameters)))
    return found


@pytest.fixture
def one_by_one(clicks: Batches, settings: Settings, tmp_path: Path) -> Batches:
    (tmp_path / "clicks.py").write_text(DECLARED.format("source=replace(CLICKS.source, max_files=1, min_age_seconds=0)"))
    _arrive(settings, 1, 2, 3)
    return clicks


def _arrive(settings: Settings, *numbers: int) -> None:
    (settings.home / "clicks").mkdir(exist_ok=True)
    for number in numbers:
        (settings.home / f"clicks/{number}.csv").write_text("page\n")


# What a run is asked for, the txids that it covers, and what it asks of the next run.
REST: list[tuple[dict[str, float], list[int], dict[str, int] | None]] = [
    ({}, [1, 2, 3], {}),
    ({"max_batches": 3}, [1, 2, 3], None),
    ({"max_batches": 7}, [1, 2, 3], {"max_batches": 4}),
    ({"from_txid": 1, "to_txid": 5}, [1, 2, 3], {"from_txid": 4, "to_txid": 5}),
    ({"to_txid": 3}, [1, 2, 3], None),
    ({"to_txid": 2.0}, [1, 2], None),  # a whole number to Airflow's schema
]


@pytest.mark.promise("limit:BATCHES_PER_RUN")
@pytest.mark.parametrize("case", REST)
@pytest.mark.usefixtures("one_by_one")
def test_a_plan_that_leaves_batches_over_queues_the_next_run(settings: Settings, queued: list[Any], case: Any) -> None:
    given, covered, rest = case
    _arrive(settings, *range(4, 9))
    assert [_plan(batches_per_run=3, **given) for _ in range(2)] == [covered] * 2
    assert queued == ([] if rest is None else [("continued_2__run", rest)] * 2)
    queued.clear()
    assert (_plan(batches_per_run=3, active=2, **given), queued) == (covered, []), "it would begin before this run commits"


@pytest.mark.promise("decision:0055")
def test_a_chain_of_runs_ends_at_a_batch_that_is_left_over_and_with_the_source(
    one_by_one: Batches, queued: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A batch that needs a person would otherwise be tried again by each run of the chain."""
    assert _plan(batches_per_run=2, concurrency=7) == [1, 2]
    assert "declares concurrency=4, its Dag processes 7 batches at once" in caplog.text
    one_by_one.seal(1)
    one_by_one.commit(1)
    one_by_one.store.halt_batch(CLICKS.name, 2, "a person has to look")
    with pytest.raises(AirflowSkipException, match=r"Run run, .* has not committed clicks 2\. Why: tidegate why clicks 2\."):
        _plan(batches_per_run=2, run_id="continued_2__run")
    assert one_by_one.store.turn(CLICKS.name, 2).halted is not None
    one_by_one.seal(2)
    one_by_one.commit(2)
    assert _plan(batches_per_run=2, run_id="continued_2__run") == [3]
    assert queued == [("continued_2__run", {})]


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let batches have no rows: then they are sealed as soon as they are processed."""
    monkeypatch.setattr(Processor, "_stage", lambda self, attempt: self._store.seal(attempt, [], Tracked(0)))


@pytest.mark.parametrize(("try_number", "max_tries", "attempts"), [(1, 5, 1), (2, 5, 1), (2, 6, 2), (3, 6, 1)])
@pytest.mark.usefixtures("without_spark")
def test_a_cleared_task_processes_its_batch_again(clicks: Batches, try_number: int, max_tries: int, attempts: int) -> None:
    """The first try, a retry, the first try after clearing, and a retry then."""
    clicks.plan("run", 2)
    clicks.begin(1)
    clicks.seal(2)
    _process(2).execute(_context(try_number=try_number, max_tries=max_tries))
    assert _phases(clicks) == [(1, "processing"), (2, "processed")]
    assert len(clicks.store.batch_history(CLICKS.name, 2).attempts) == attempts


@pytest.mark.promise("limit:WINDOW")
@pytest.mark.parametrize("limit", [None, timedelta(minutes=5)])
@pytest.mark.usefixtures("without_spark")
def test_a_batch_for_which_the_window_has_no_room_waits_in_the_triggerer(clicks: Batches, limit: timedelta | None) -> None:
    clicks.plan("run", WINDOW + 1)
    clicks.begin(1)
    clicks.seal(*range(2, WINDOW + 1))
    operator = _process(WINDOW + 1, execution_timeout=limit)

    with pytest.raises(TaskDeferred) as waiting:
        operator.execute(_context())

    assert _phases(clicks)[-1] == (WINDOW + 1, "planned")
    name, arguments = waiting.value.trigger.serialize()
    assert name == "tidegate.dags.batch_trigger.TurnTrigger"
    assert arguments == {"pipeline_name": CLICKS.name, "awaited": "begin", "concurrency": 1}
    assert waiting.value.timeout == timedelta(hours=6)
    go_on = getattr(operator, waiting.value.method_name)
    clicks.store.halt_batch(CLICKS.name, 1, "a person has to look")
    with pytest.raises(AirflowFailException, match="txid 1 is halted"):
        go_on(_context(), Halt(reason="txid 1 is halted", waits_for=None))

    clicks.seal(1)
    clicks.commit(1)
    go_on(_context(), None)
    assert _phases(clicks) == [(txid, "committed") for txid in range(1, WINDOW + 2)]


@pytest.mark.promise("performance:task-that-is-finished-goes-on-with")
@pytest.mark.usefixtures("without_spark")
def test_a_task_goes_on_with_batches_that_have_not_begun(clicks: Batches) -> None:
    clicks.plan("run", 5)
    clicks.store.fail_attempt(clicks.begin(4), "STORE_UNAVAILABLE: gone")
    _process(2).execute(_context())
    assert _phases(clicks) == [*((txid, "committed") for txid in (1, 2, 3)), (4, "failed"), (5, "processed")]
    ran = [clicks.store.batch_history(CLICKS.name, txid).attempts[0] for txid in (2, 1, 5)]
    assert {(attempt["airflow_run_id"], attempt["airflow_try"]) for attempt in ran} == {("run", 6)}
    assert [attempt["airflow_task_id"] for attempt in ran] == [PROCESS, *[f"{PROCESS} of txid 2"] * 2]
    assert ran[2]["owner"] == f"Airflow run, {PROCESS} of txid 2, try 6"


def created(task_id: str, map_index: int, *, state: str | None = None, tries: int = 0, **arguments: Any) -> SimpleNamespace:
    """Return a new task instance, as the policy leaves it, of a Dag as the scheduler has it."""
    dag = batch_dag.batch_dag("flights", concurrency=3, **arguments)
    task = DagSerialization.from_dict(DagSerialization.to_dict(dag)).get_task(task_id)
    unset = dict.fromkeys(("scheduled_dttm", "context_carrier", "_rendered_map_index"))
    known = {"task": task, "operator": task.task_type, "map_index": map_index, "state": state, "try_number": tries}
    instance = SimpleNamespace(**known, **unset)
    airflow_policy.task_instance_mutation_hook(instance, SimpleNamespace(dag_id="flights", run_id="run", context_carrier={}))
    return instance


@pytest.mark.promise("performance:so-do-process-tasks-except-first-ones")
def test_as_many_are_scheduled_as_the_run_may_have_workers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(airflow_policy, "_txids_of", {("flights", "run"): list(range(11, 21))})
    tasks = [created(PROCESS, map_index) for map_index in range(10)]
    assert [task.state for task in tasks] == ["scheduled"] * 3 + [None] * 7
    assert [task.try_number for task in tasks] == [1] * 3 + [0] * 7
    assert [task.scheduled_dttm is not None for task in tasks] == [True] * 3 + [False] * 7
    assert [task._rendered_map_index for task in tasks] == [f"txid {txid}" for txid in range(11, 21)]
    # Airflow creates later instances in the state that the first one has after the policy, and asks again at each load.
    late = created(PROCESS, 3, state="scheduled")
    assert (late.state, late.try_number, late.scheduled_dttm) == (None, 0, None)
    for state, tries in (("running", 1), ("scheduled", 1), ("success", 0), ("removed", 0)):
        assert created(PROCESS, 0, state=state, tries=tries).state == state
    for given in ({"depends_on_past": True}, {"execution_timeout": timedelta(minutes=5)}):
        assert created(PROCESS, 0, default_args=given).state is None
    commit = created(COMMIT, 0)
    assert (commit.state, commit._rendered_map_index) == (None, "txid 11")
