"""PostgresTable keeps the promises of both its kinds on every supported version of Postgres."""

import pytest

from tests.sources.feeds import FEEDS
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.testing import PROMISES, check_source
from tidegate.state_store import Settings

FEED_OF = {"transactional": "PostgresTable by key", "opaque": "PostgresTable by time"}


@pytest.mark.promise("I11", "I12")
@pytest.mark.parametrize("kind", FEED_OF)
def test_a_table_keeps_its_promises(settings: Settings, kind: str) -> None:
    with spark_session(settings, "conformance") as spark:
        kept = list(check_source(lambda: FEEDS[FEED_OF[kind]](settings, 0), spark, settings))
    assert PROMISES[kind].keys() - kept == ({"what_is_hidden_comes_in_a_later_batch"} if kind == "opaque" else set())
