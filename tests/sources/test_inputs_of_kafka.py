"""A topic and a folder in one pipeline, joined with a reference, on a real broker."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import functions as F

from tests import steps
from tests.sources.beside_kafka import server
from tests.sources.feeds import SCHEMA, KafkaFeed
from tidegate.jobs import Count, Files, FixedBatches, Inputs, Pipeline, Reference, State, Sum
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import RowsLost

__all__ = ["server"]  # a fixture


def united(inputs: Any) -> Any:
    """Unite the records of the topic with the rows of the folder, and multiply each by its factor."""
    records = inputs["topic"].selectExpr("CAST(key AS string) AS name", "CAST(CAST(value AS string) AS int) AS amount")
    return records.unionByName(inputs["folder"]).join(inputs["factors"], "name").selectExpr("name", "amount * factor AS amount")


@pytest.mark.soak
def test_a_topic_and_a_folder_count_under_the_same_txids(settings: Settings, register: Callable[..., None]) -> None:
    """Each record and each row once, whichever of the two has more; the whole is opaque, as the topic is."""
    feed = KafkaFeed(settings, "opaque")
    files = Files("folder", format="csv", schema=SCHEMA)
    factors = Reference(Files("factors", format="csv", schema={"name": "string", "factor": "int"}))
    state = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")}, kind="opaque")
    source = Inputs({"topic": feed.source, "folder": files, "factors": factors})
    pipeline = Pipeline(name="conformance", source=source, states={"per_name": state}, transform=united)
    register(pipeline)
    for folder in ("folder", "factors"):
        (settings.home / folder).mkdir()
    (settings.home / "factors/1.csv").write_text("name,factor\n" + "".join(f"row {n},{n + 1}\n" for n in range(9)))
    lines, amounts = Counter[str](), Counter[str]()

    def expect(rows: list[tuple[str, int]]) -> None:
        for name, amount in rows:
            lines[name] += 1
            amounts[name] += amount * (int(name.removeprefix("row ")) + 1)

    for run, (records, texts) in enumerate([(5, 1), (0, 2), (3, 0)]):
        expect([(key.decode(), int(value)) for key, value, *_ in feed.put(records)])
        for number in range(texts):
            rows = [(f"row {number}", 10 * run), ("row 8", number)]
            content = "name,amount\n" + "".join(f"{name},{amount}\n" for name, amount in rows)
            (settings.home / f"folder/{run}{number}.csv").write_text(content)
            expect(rows)
        run_pipeline(settings, pipeline, run_id=f"run {run}")
    with StateStore.connect(settings) as store:
        found = {row["name"]: (row["lines"], row["amount"]) for row in store.state_rows(pipeline.spec.states[0])}
        slices = [set(store.source_metadata("conformance", txid)["inputs"]) for txid in range(1, 8)]
    assert found == {name: (lines[name], amounts[name]) for name in lines}
    assert slices == [{"topic", "folder"}, {"topic"}, {"topic"}, {"folder"}, {"folder"}, {"topic"}, {"topic"}]


def test_two_topics_count_under_the_same_txids(settings: Settings, register: Callable[..., None]) -> None:
    """A batch may have records of both: each topic's are counted by themselves."""
    feeds = {name: KafkaFeed(settings, "transactional") for name in ("web", "app")}
    source = Inputs({name: feed.source for name, feed in feeds.items()})
    state = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")})

    def united_topics(inputs: Any) -> Any:
        columns = "CAST(key AS string) AS name", "CAST(CAST(value AS string) AS int) AS amount"
        return inputs["web"].selectExpr(*columns).unionByName(inputs["app"].selectExpr(*columns))

    pipeline = Pipeline(name="conformance", source=source, states={"per_name": state}, transform=united_topics)
    register(pipeline)
    expected: Counter[str] = Counter()
    for run, counts in enumerate([(2, 0), (3, 5), (0, 1)]):
        for feed, count in zip(feeds.values(), counts, strict=True):
            expected.update(key.decode() for key, *_ in feed.put(count))
        run_pipeline(settings, pipeline, run_id=f"run {run}")
    with StateStore.connect(settings) as store:
        assert {row["name"]: row["lines"] for row in store.state_rows(pipeline.spec.states[0])} == expected


@pytest.mark.soak
def test_a_join_that_reads_a_topic_twice_says_what_to_do(settings: Settings, register: Callable[..., None]) -> None:
    """Spark reads one side of a join without equal columns for each task of the other: no broker has lost a record."""
    feed = KafkaFeed(settings, "transactional")
    lists = FixedBatches([[("row 0", 1), ("row 1", 2), ("row 2", 9)]], SCHEMA)

    def joined(inputs: Any) -> Any:
        records = inputs["topic"].selectExpr("CAST(CAST(value AS string) AS int) AS least")
        return inputs["lists"].join(records, F.expr("amount > least")).select("name", "amount")

    state = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")})
    source = Inputs({"lists": lists, "topic": feed.source})
    pipeline = Pipeline(name="conformance", source=source, states={"per_name": state}, transform=joined)
    register(pipeline)
    feed.put(2)
    assert steps.plan(settings, pipeline, run_id="run") == [1]
    with pytest.raises(RowsLost, match=r"unless one side is marked by broadcast\(\)"):
        steps.process(settings, pipeline, 1, owner="test")
