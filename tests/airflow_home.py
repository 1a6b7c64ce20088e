"""Airflow in the test process, with a home of its own: importing this module imports Airflow."""

import tempfile

import pytest

with pytest.MonkeyPatch.context() as _environment:
    # Airflow reads its settings on import, and would write them into the home folder of the user.
    _environment.setenv("AIRFLOW_HOME", tempfile.mkdtemp(prefix="tidegate-airflow-"))
    _environment.setenv("AIRFLOW__CORE__LOAD_EXAMPLES", "False")
    import airflow.settings  # noqa: F401
