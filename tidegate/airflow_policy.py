"""Names both tasks of a batch after its txid in Airflow, from the moment that they exist, and starts the first ones at once.

Airflow renders a task's `map_index_template` in the worker that runs the task. A commit task mostly ends without a worker, and
a process task may wait long for one; until then Airflow would show their positions in the run. So a policy of Airflow's
scheduler names them: Airflow finds it by the entry point ``airflow.policy`` of this project. Without it, only those names are
missing, and runs begin some seconds later.

Process tasks start in the triggerer, which takes some seconds to send them to a worker. The first of a run, as many as it may
have workers for, are not to wait for that, so the policy schedules them as Airflow would schedule other tasks.

Where any policy looks at new task instances, Airflow creates them in another way, which leaves them out of the trace of their
run. So this one also puts them into it, those of all Dags.

This module is imported by every process of Airflow, so it imports nothing of ours.
"""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow.policies import hookimpl
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from sqlalchemy.orm import object_session

if TYPE_CHECKING:
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance

OPERATORS = ("ProcessBatch", "CommitSensor")
# The txids of the last run that was expanded: they never change, and Airflow asks for each task of it in turn.
_txids_of: dict[tuple[str, str], list[int]] = {}


@hookimpl  # type: ignore[untyped-decorator]
def task_instance_mutation_hook(task_instance: "TaskInstance", dag_run: "DagRun | None") -> None:
    """Name a task instance of a batch, when the scheduler creates it or refreshes it without a name; put any into its trace."""
    if dag_run is not None and dag_run.context_carrier and task_instance.context_carrier is None:
        task_instance.context_carrier = _place_in_trace(dag_run.context_carrier)
    if (
        dag_run is None
        or task_instance.operator not in OPERATORS
        or task_instance.map_index < 0
        or task_instance._rendered_map_index is not None
    ):
        return
    txids = _txids(dag_run)
    if task_instance.map_index < len(txids):
        task_instance._rendered_map_index = f"txid {txids[task_instance.map_index]}"
        if task_instance.operator == "ProcessBatch" and task_instance.try_number == 0:
            _schedule_if_first(task_instance)


def _schedule_if_first(task_instance: "TaskInstance") -> None:
    """Schedule a new task instance for a worker, if it is among the first of its run.

    Airflow creates it once all that it depends on in its run is done; a task that depends on earlier runs is left to Airflow.
    """
    task = task_instance.task
    if task_instance.state not in (None, "scheduled") or not task.start_from_trigger or task.depends_on_past:
        return
    from airflow.serialization.decoders import smart_decode_trigger_kwargs  # noqa: PLC0415 - as in `_txids`

    concurrency = smart_decode_trigger_kwargs(task.start_trigger_args.trigger_kwargs).get("concurrency", 0)
    is_first = task_instance.map_index < concurrency
    # Set for all of them, because Airflow creates the later ones in the state of the first.
    task_instance.state = "scheduled" if is_first else None
    task_instance.try_number = int(is_first)
    task_instance.scheduled_dttm = datetime.now(UTC) if is_first else None


def _place_in_trace(run_carrier: "dict[str, str]") -> "dict[str, str]":
    """Return the place of a new task instance in the trace of its run: a span of its own, which Airflow records at its end."""
    task_run = trace.get_tracer(__name__).start_span("task_run", TraceContextTextMapPropagator().extract(run_carrier))
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(task_run))
    return carrier


def _txids(dag_run: "DagRun") -> list[int]:
    """Return the txids that the run's plan has passed on; none while it has not."""
    from airflow.models.xcom import XComModel  # noqa: PLC0415 - settings of Airflow are not ready when this module is imported

    run = dag_run.dag_id, dag_run.run_id
    if run not in _txids_of:
        session = object_session(dag_run)
        if session is None:
            return []
        planned = XComModel.get_many(run_id=dag_run.run_id, key="return_value", task_ids="plan", dag_ids=dag_run.dag_id)
        found = session.scalars(planned).first()
        if found is None:
            return []
        txids = XComModel.deserialize_value(found)
        if not isinstance(txids, list):  # a backend that keeps values elsewhere stores a reference
            return []
        _txids_of.clear()
        _txids_of[run] = txids
    return _txids_of[run]
