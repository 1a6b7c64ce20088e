"""From the tasks of a batch, Airflow leads to the batch on the operator's page, whatever the state of the task."""

from types import SimpleNamespace

from airflow.models.taskinstancekey import TaskInstanceKey
from airflow.serialization.serialized_objects import DagSerialization

from tidegate.dags.batch_dag import batch_dag
from tidegate.dags.batch_trigger import COMMIT, PROCESS


def test_the_tasks_of_a_batch_have_a_button_and_the_plan_has_none() -> None:
    """The api-server makes it from the serialized Dag: no task has to run, and a commit task mostly does not."""
    dag = DagSerialization.deserialize_dag(DagSerialization.serialize_dag(batch_dag("flights")))

    for task_id in (PROCESS, COMMIT):
        task = dag.get_task(task_id)
        key = TaskInstanceKey("flights", task_id, "manual__2026-11-25T10:00:00+00:00", 1, 16)
        assert task.extra_links == ["Batch in Tidegate"]
        assert task.get_extra_links(SimpleNamespace(key=key), "Batch in Tidegate") == (
            "/tidegate/go?pipeline=flights&run=manual__2026-11-25T10%3A00%3A00%2B00%3A00&position=16"
        )
    assert dag.get_task("plan").extra_links == []
