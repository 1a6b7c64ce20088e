"""The examples of a page run in one Spark session, which the tests of a process share."""

from typing import Any

import pytest

from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.engine import processing


@pytest.fixture(autouse=True)
def one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pipelines join the session of tests, whatever they are called: a new one takes seconds."""

    def join(settings: Any, _pipeline: str, **more: Any) -> Any:
        return spark_session(settings, "inbox", **more)

    monkeypatch.setattr(processing, "spark_session", join)
