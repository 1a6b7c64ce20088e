"""Tidegate: exactly-once batch pipelines.

    from tidegate import Count, Files, Pipeline, State, Sum, batch_dag

Pipelines and Dags import this module only. A name is loaded when it is first used, so a declaration loads neither Spark nor
Airflow. Tidegate is deployed as a checkout or as its image, where ``dags``, ``jobs`` and ``state_store`` are its own packages;
if Python finds other packages of these names first, the import fails with an explanation.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.dags.batch_dag import batch_dag
    from tidegate.jobs import (
        ApproxDistinct,
        ApproxQuantiles,
        Avg,
        BitAnd,
        BitOr,
        BitXor,
        BoolAnd,
        BoolOr,
        Changes,
        Check,
        CollectList,
        CollectSet,
        Combiner,
        Count,
        Delta,
        Files,
        First,
        FixedBatches,
        Histogram,
        History,
        Iceberg,
        Inputs,
        Kafka,
        Largest,
        Last,
        Max,
        Min,
        Newest,
        Pipeline,
        PostgresTable,
        Query,
        Ranges,
        Reference,
        Rows,
        Session,
        Sliding,
        Smallest,
        Source,
        State,
        StateQuery,
        StdDev,
        Sum,
        Tumbling,
        Update,
        Variance,
        state_query,
    )
    from tidegate.jobs.engine.local_run import run_pipeline
    from tidegate.state_store import Settings, StateStore
    from tidegate.state_store.state_rows import StateReader

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
    "Settings": "state_store",
    "StateReader": "tidegate.state_store.state_rows",
    "StateStore": "state_store",
    "batch_dag": "tidegate.dags.batch_dag",
    "run_pipeline": "tidegate.jobs.engine.local_run",
}
_ROOT = Path(__file__).resolve().parent.parent


def __getattr__(name: str) -> Any:
    """Load a public name from the package that defines it.

    Raises: AttributeError for any other name; ImportError if another package shadows one of Tidegate's.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "jobs")
    for package in ("state_store", "jobs", "dags"):
        _check_own(package)
    found = getattr(import_module(home), name)
    globals()[name] = found
    return found


@cache
def _check_own(package: str) -> None:
    place = Path(import_module(package).__file__ or "").resolve()
    if not place.is_relative_to(_ROOT):
        raise ImportError(
            f"Tidegate's package {package} is in {_ROOT / package}, but Python found another one first: {place}. Tidegate runs "
            "from a checkout or its image, and does not share an environment with packages called dags, jobs, state_store or "
            f"migrations. Put {_ROOT} first on PYTHONPATH, or rename the other package."
        )
