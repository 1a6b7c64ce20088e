"""The link from a batch's task in Airflow to the batch on the page.

Airflow stores an operator's own links while the task runs, and a commit task mostly ends without a worker. The links of a
plugin are made by the api-server for each look at the task, whatever its state.
"""

from typing import Any, ClassVar
from urllib.parse import urlencode, urlsplit

from airflow.configuration import conf
from airflow.sdk import BaseOperatorLink

from tidegate.page import PREFIX


def _operator(name: str) -> type:
    """Return a class named like an operator in tidegate.dags.batch_tasks: Airflow compares names; nothing is imported."""
    return type(name, (), {"__module__": "tidegate.dags.batch_tasks"})


class BatchLink(BaseOperatorLink):  # type: ignore[misc]
    """A button on the page of a task."""

    name = "Batch in Tidegate"
    operators: ClassVar[list[type]] = [_operator("ProcessBatch"), _operator("CommitSensor")]

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 - Airflow's signature
        """Return the address that leads to the batch, whose txid the ledger knows."""
        root = urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/")
        query = {"pipeline": ti_key.dag_id, "run": ti_key.run_id, "position": ti_key.map_index}
        return f"{root}{PREFIX}/go?{urlencode(query)}"
