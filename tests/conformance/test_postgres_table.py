"""PostgresTable keeps the promises of both its kinds on every supported version of Postgres."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.conformance.conftest import BOTH_POSTGRES_IN_SOAK
from tests.conftest import Server
from tests.sources.feeds import FEEDS
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.testing import PROMISES, Bench, NotPossible
from tidegate.state_store import Settings

pytestmark = BOTH_POSTGRES_IN_SOAK
FEED_OF = {"transactional": "PostgresTable by key", "opaque": "PostgresTable by time"}
CASES = [(kind, promise) for kind in FEED_OF for promise in PROMISES[kind].items()]


@pytest.fixture
def spark(settings: Settings, server: Server) -> Iterator[SparkSession]:
    """A session; a reader by time has to see when open transactions began."""
    with server.shows_transactions_to("tidegate_stager"), spark_session(settings, "conformance") as session:
        yield session


@pytest.mark.parametrize(("kind", "promise"), CASES, ids=[f"{kind}-{promise[0]}" for kind, promise in CASES])
def test_a_table_keeps_its_promises(settings: Settings, spark: SparkSession, kind: str, promise: tuple) -> None:
    """Each promise of each kind; no row of a table can be hidden until a later batch."""
    name, holds = promise
    try:
        holds(Bench(FEEDS[FEED_OF[kind]](settings, 0), spark, settings))
    except NotPossible:
        assert name == "what_is_hidden_comes_in_a_later_batch"
