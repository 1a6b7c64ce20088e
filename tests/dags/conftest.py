"""Airflow in the test process, and batches in a real ledger, without Spark."""

from collections.abc import Callable
from pathlib import Path

import pytest

import tests.airflow_home  # noqa: F401 - before anything else imports Airflow
from tests.batches import Batches
from tidegate.jobs import Count, Files, Pipeline, State
from tidegate.state_store import StateStore

REPOSITORY = Path(__file__).resolve().parents[2]
CLICKS = Pipeline(
    name="clicks",
    source=Files("clicks", glob="*.csv", format="csv", schema={"page": "string"}),
    states={"per_page": State(key={"page": "text"}, aggregates={"clicks": Count()})},
)


@pytest.fixture
def batches(store: StateStore, register: Callable[..., None]) -> Batches:
    register(CLICKS)
    return Batches(store, CLICKS)
