"""Crashes and racing planners for Kafka, with a real broker."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.acceptance.test_every_source import STRIDE, die_everywhere, oracle, pipeline_over, race, stored
from tests.conftest import Server
from tests.sources.beside_kafka import server, template
from tests.sources.feeds import KafkaFeed
from tidegate.jobs import Pipeline
from tidegate.state_store import Settings

__all__ = ["server", "template"]  # fixtures

KINDS = ("transactional", "opaque")


def over(feed: KafkaFeed) -> Pipeline:
    """Declare a pipeline that counts the feed's records by key."""

    def parse(records: Any) -> Any:
        return records.selectExpr("string(key) AS name", "int(string(value)) AS amount")

    return pipeline_over(feed, transform=parse)


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_anywhere_leaves_the_state_of_a_clean_run(
    settings: Settings, server: Server, register: Callable[..., None], kind: str
) -> None:
    """Runs die before statements and around COMMITs of plan, process and commit; the next run repairs it."""
    feed = KafkaFeed(settings, kind)
    pipeline = over(feed)
    register(pipeline)
    die_everywhere(settings, server, pipeline, feed, first_point=1 + KINDS.index(kind) % STRIDE)


@pytest.mark.parametrize("kind", KINDS)
def test_planners_at_the_same_moment_plan_each_record_once(
    settings: Settings, register: Callable[..., None], kind: str
) -> None:
    """Two runs read the same topic; a batch that both process counts once."""
    feed = KafkaFeed(settings, kind)
    pipeline = over(feed)
    register(pipeline)
    rows = feed.put(6)
    race(settings, pipeline)
    assert stored(settings, pipeline) == oracle(rows)
