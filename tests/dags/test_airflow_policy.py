"""The policy of Airflow's scheduler: the first process tasks of a run go to workers as soon as they exist."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.serialization.serialized_objects import DagSerialization

from tidegate import airflow_policy
from tidegate.dags import batch_dag
from tidegate.dags.batch_trigger import COMMIT, PROCESS

CONCURRENCY = 3
RUN = SimpleNamespace(dag_id="flights", run_id="run", context_carrier={})


@pytest.fixture(autouse=True)
def plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose plan has passed on ten txids."""
    monkeypatch.setattr(airflow_policy, "_txids_of", {("flights", "run"): list(range(11, 21))})


def created(task_id: str, map_index: int, *, state: str | None = None, tries: int = 0, **arguments: Any) -> SimpleNamespace:
    """Return a new task instance, as the policy leaves it, of a Dag as the scheduler has it."""
    dag = batch_dag.batch_dag("flights", concurrency=CONCURRENCY, **arguments)
    task = DagSerialization.from_dict(DagSerialization.to_dict(dag)).get_task(task_id)
    unset = dict.fromkeys(("scheduled_dttm", "context_carrier", "_rendered_map_index"))
    known = {"task": task, "operator": task.task_type, "map_index": map_index, "state": state, "try_number": tries}
    instance = SimpleNamespace(**known, **unset)
    airflow_policy.task_instance_mutation_hook(instance, RUN)
    return instance


@pytest.mark.promise("performance:so-do-process-tasks-except-first-ones")
def test_as_many_are_scheduled_as_the_run_may_have_workers_for() -> None:
    tasks = [created(PROCESS, map_index) for map_index in range(10)]
    assert [task.state for task in tasks] == ["scheduled"] * CONCURRENCY + [None] * 7
    assert [task.try_number for task in tasks] == [1] * CONCURRENCY + [0] * 7
    assert [task.scheduled_dttm is not None for task in tasks] == [True] * CONCURRENCY + [False] * 7
    assert [task._rendered_map_index for task in tasks] == [f"txid {txid}" for txid in range(11, 21)]
    # Airflow creates later instances in the state that the first one has after the policy, and asks again at each load.
    late = created(PROCESS, CONCURRENCY, state="scheduled")
    assert (late.state, late.try_number, late.scheduled_dttm) == (None, 0, None)
    for state, tries in (("running", 1), ("scheduled", 1), ("success", 0), ("removed", 0)):
        assert created(PROCESS, 0, state=state, tries=tries).state == state
    for given in ({"depends_on_past": True}, {"execution_timeout": timedelta(minutes=5)}):
        assert created(PROCESS, 0, default_args=given).state is None
    commit = created(COMMIT, 0)
    assert (commit.state, commit._rendered_map_index) == (None, "txid 11")
