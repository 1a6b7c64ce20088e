"""Deaths for Kafka, with a real broker."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.acceptance.test_every_source import die_everywhere, die_in_turn, pipeline_over
from tests.servers import Server
from tests.sources.beside_kafka import server
from tests.sources.feeds import KafkaFeed
from tidegate.jobs import Pipeline
from tidegate.state_store import Settings

__all__ = ["server"]  # a fixture

BOTH_KINDS = pytest.mark.parametrize("kind", ["transactional", "opaque"])
Begin = Callable[[str], tuple[KafkaFeed, Pipeline]]


@pytest.fixture
def begin(settings: Settings, register: Callable[..., None]) -> Begin:
    """A function that registers a pipeline which counts a topic's records by key."""

    def parse(records: Any) -> Any:
        return records.selectExpr("string(key) AS name", "int(string(value)) AS amount")

    def over(kind: str) -> tuple[KafkaFeed, Pipeline]:
        feed = KafkaFeed(settings, kind)
        pipeline = pipeline_over(feed, transform=parse)
        register(pipeline)
        return feed, pipeline

    return over


@pytest.mark.sampled(1)
@BOTH_KINDS
def test_deaths_around_each_commit_leave_the_state_of_a_clean_run(settings: Settings, begin: Begin, kind: str) -> None:
    """In turn, in one history: what is left over of each is taken up by the next."""
    feed, pipeline = begin(kind)
    die_in_turn(settings, pipeline, feed)


@pytest.mark.soak
@BOTH_KINDS
def test_a_crash_at_any_statement_leaves_the_state_of_a_clean_run(
    settings: Settings, server: Server, begin: Begin, kind: str
) -> None:
    """Runs die before statements and around COMMITs of plan, process and commit; the next run repairs it."""
    feed, pipeline = begin(kind)
    die_everywhere(settings, server, pipeline, feed)
