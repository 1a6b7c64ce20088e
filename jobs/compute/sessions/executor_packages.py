"""Checks that executors on other machines have the Python packages that tasks need and that are not sent to them."""

import json
from collections.abc import Collection, Iterable
from importlib.metadata import version

import grpc
from pyspark.errors import PySparkException, PythonException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tidegate.jobs.spark.spark_errors import is_away, raised_in_python
from tidegate.state_store.base.errors import ExecutorsUnprepared

# What all tasks need: import names, with the names of the distributions. Spark needs pandas for its Arrow functions.
NEEDED = {"pyarrow": "pyarrow", "numpy": "numpy", "pandas": "pandas", "psycopg2": "psycopg2-binary"}
PYTHON_DIFFERS, NO_PYTHON = "PYTHON_VERSION_MISMATCH", "Cannot run program"


def check_executors(session: SparkSession, tasks: int, packages: Collection[str] = ()) -> None:
    """Import the packages NEEDED and these in some tasks; this checks each executor that runs one of them.

    Raises: ExecutorsUnprepared, which names machine and packages; Spark's errors.
    """
    names = sorted({*NEEDED, *packages})

    def missing_packages(
        _: int,
    ) -> str:  # an inner function is sent as code: one of a module would first import packages of that module
        import importlib  # noqa: PLC0415
        import json  # noqa: PLC0415
        import platform  # noqa: PLC0415

        absent = []
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError:
                absent.append(name)
        return json.dumps([platform.node(), absent])

    try:
        # Without Arrow, which needs some of the packages itself.
        answers = (
            session.range(0, tasks, 1, tasks)
            .select(F.udf(missing_packages, "string", useArrow=False)("id").alias("found"))
            .collect()
        )
    except (PySparkException, grpc.RpcError) as error:
        if is_away(error) or not (reason := _reason(error)):
            raise
        raise ExecutorsUnprepared(f"Spark's executors cannot run Tidegate's tasks: {reason}") from error
    missing = {machine: absent for machine, absent in (json.loads(row.found) for row in answers) if absent}
    if missing:
        raise ExecutorsUnprepared(f"Spark's executors lack Python packages: {_advice(missing.items())}")


def _advice(missing: Iterable[tuple[str, list[str]]]) -> str:
    where = "; ".join(f"{', '.join(absent)} on {machine}" for machine, absent in missing)
    names = sorted({name for _, absent in missing for name in absent})
    distributions = [NEEDED.get(name, name) for name in names]
    pins = " ".join(f"'{name}=={version(name)}'" for name in distributions)
    return (
        f"{where}. Install them for the Python that executors run (PYSPARK_PYTHON): python -m pip install {pins}; or send "
        "a packed environment: docs/spark-cluster.md."
    )


def _reason(error: Exception) -> str | None:
    """Return why executors could not run Python code; None if the error has another cause."""
    text = str(error)
    if PYTHON_DIFFERS in text:
        mismatch = text.partition(PYTHON_DIFFERS)[2].splitlines()[0].lstrip("] ")
        return f"{mismatch} Let PYSPARK_PYTHON of the Connect server name another one."
    if NO_PYTHON in text:
        program = text.partition(NO_PYTHON)[2].splitlines()[0].strip(' "')
        return f"there is no Python at {program}. Let PYSPARK_PYTHON of the Connect server name the one to run."
    if isinstance(error, PythonException) and any(name.endswith("ModuleNotFoundError") for name, _ in raised_in_python(text)):
        return raised_in_python(text)[-1][1]
    return None
