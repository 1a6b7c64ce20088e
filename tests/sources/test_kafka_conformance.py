"""Kafka keeps the promises of both its kinds, on a real broker."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.sources.beside_kafka import server, template
from tests.sources.feeds import KafkaFeed
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.testing import PROMISES, Bench, NotPossible
from tidegate.state_store import Settings

__all__ = ["server", "template"]  # fixtures

CASES = [(kind, promise) for kind in ("transactional", "opaque") for promise in PROMISES[kind].items()]


@pytest.fixture
def spark(settings: Settings) -> Iterator[SparkSession]:
    """The session that all tests of this folder share."""
    with spark_session(settings, "conformance") as session:
        yield session


@pytest.mark.parametrize(("kind", "promise"), CASES, ids=[f"{kind}-{promise[0]}" for kind, promise in CASES])
def test_kafka_keeps_its_promises(settings: Settings, spark: SparkSession, kind: str, promise: tuple) -> None:
    """Each promise of each kind. Faults that a topic cannot have are tested in tests/sources."""
    name, holds = promise
    try:
        holds(Bench(KafkaFeed(settings, kind), spark, settings))
    except NotPossible:
        assert name in (
            *("a_changed_row_is_noticed", "what_is_hidden_stops_the_replay"),
            "what_is_hidden_comes_in_a_later_batch",
        )
