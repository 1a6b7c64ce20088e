"""Tidegate: exactly-once batch pipelines.

    from tidegate import Count, Files, Pipeline, State, Sum, batch_dag

Pipelines and Dags import this module only. A name is loaded when it is first used, so a declaration loads neither Spark nor
Airflow. In a checkout, the subpackages ``dags``, ``jobs``, ``state_store`` and ``migrations`` are links to the folders of
these names beside this one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.dags.batch_dag import batch_dag
    from tidegate.jobs import *
    from tidegate.jobs.engine.local_run import run_pipeline
    from tidegate.state_store import Settings, StateStore
    from tidegate.state_store.read_states.state_rows import StateReader

__all__ = [
    "ApproxDistinct",
    "ApproxQuantiles",
    "Avg",
    "BitAnd",
    "BitOr",
    "BitXor",
    "BoolAnd",
    "BoolOr",
    "Changes",
    "Check",
    "CollectList",
    "CollectSet",
    "Combiner",
    "Count",
    "Delta",
    "Files",
    "First",
    "FixedBatches",
    "Histogram",
    "History",
    "Iceberg",
    "Inputs",
    "Kafka",
    "Largest",
    "Last",
    "Max",
    "Min",
    "Newest",
    "Pipeline",
    "PostgresTable",
    "Query",
    "Ranges",
    "Reference",
    "Rows",
    "Session",
    "Settings",
    "Sliding",
    "Smallest",
    "Source",
    "State",
    "StateQuery",
    "StateReader",
    "StateStore",
    "StdDev",
    "Sum",
    "Tumbling",
    "Update",
    "Variance",
    "batch_dag",
    "run_pipeline",
    "state_query",
]

_HOMES = {
    "Settings": "tidegate.state_store",
    "StateReader": "tidegate.state_store.read_states.state_rows",
    "StateStore": "tidegate.state_store",
    "batch_dag": "tidegate.dags.batch_dag",
    "run_pipeline": "tidegate.jobs.engine.local_run",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the package that defines it.

    Raises: AttributeError for any other name.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_HOMES.get(name, "tidegate.jobs")), name)
    globals()[name] = found
    return found
