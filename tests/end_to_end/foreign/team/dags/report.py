"""A Dag of the other team."""

from typing import Any

from airflow.sdk import DAG, BaseOperator

import migrations  # noqa: F401 - as a Dag of theirs may
import state_store  # noqa: F401
from dags import OWNER
from jobs.probes import note
from jobs.waiting import Glance

note("dag-file")


class Look(BaseOperator):
    """Waits in the triggerer, and goes on in a worker."""

    def execute(self, context: Any) -> None:  # noqa: ARG002 - Airflow calls it so
        """Wait."""
        self.defer(trigger=Glance(), method_name="look")

    def look(self, context: Any, event: str) -> str:  # noqa: ARG002
        """Note what the worker has imported."""
        note("worker")
        return event


with DAG("report", schedule=None, tags=[OWNER]):
    Look(task_id="look")
