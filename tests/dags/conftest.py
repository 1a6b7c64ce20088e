"""Airflow in the test process, and batches in a real ledger, without Spark."""

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

import tests.airflow_home  # noqa: F401 - before anything else imports Airflow
from tests.batches import Batches
from tidegate.jobs import Count, Files, Pipeline, State
from tidegate.state_store import StateStore

PATIENCE_SECONDS = 120
CLICKS = Pipeline(
    name="clicks",
    source=Files("clicks", glob="*.csv", format="csv", schema={"page": "string"}),
    states={"per_page": State(key={"page": "text"}, aggregates={"clicks": Count()})},
)


def in_a_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Let an asynchronous test run, for two minutes at most."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), PATIENCE_SECONDS))

    return run


@pytest.fixture
def batches(store: StateStore, register: Callable[..., None]) -> Batches:
    register(CLICKS)
    return Batches(store, CLICKS)
