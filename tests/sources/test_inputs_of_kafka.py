"""Two topics and a folder in one pipeline, joined with a reference, on a real broker."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.sources.beside_kafka import server
from tests.sources.feeds import SCHEMA, KafkaFeed
from tidegate.jobs import Count, Files, Inputs, Pipeline, Reference, State, Sum
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore

__all__ = ["server"]  # a fixture


def united(inputs: Any) -> Any:
    """Unite the records of both topics with the rows of the folder, and multiply each by its factor."""
    columns = "CAST(key AS string) AS name", "CAST(CAST(value AS string) AS int) AS amount"
    records = inputs["web"].selectExpr(*columns).unionByName(inputs["app"].selectExpr(*columns))
    return records.unionByName(inputs["folder"]).join(inputs["factors"], "name").selectExpr("name", "amount * factor AS amount")


@pytest.mark.soak
def test_topics_and_a_folder_count_under_the_same_txids(settings: Settings, register: Callable[..., None]) -> None:
    feeds = {name: KafkaFeed(settings, "opaque") for name in ("web", "app")}
    files = Files("folder", format="csv", schema=SCHEMA)
    factors = Reference(Files("factors", format="csv", schema={"name": "string", "factor": "int"}))
    state = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")}, kind="opaque")
    source = Inputs({**{name: feed.source for name, feed in feeds.items()}, "folder": files, "factors": factors})
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

    for run, (of_web, of_app, texts) in enumerate([(3, 1, 1), (0, 2, 1), (1, 0, 0)]):
        for feed, count in zip(feeds.values(), (of_web, of_app), strict=True):
            expect([(key.decode(), int(value)) for key, value, *_ in feed.put(count)])
        for number in range(texts):
            rows = [(f"row {number}", 10 * run), ("row 8", number)]
            content = "name,amount\n" + "".join(f"{name},{amount}\n" for name, amount in rows)
            (settings.home / f"folder/{run}{number}.csv").write_text(content)
            expect(rows)
        run_pipeline(settings, pipeline, run_id=f"run {run}")
    with StateStore.connect(settings) as store:
        found = {row["name"]: (row["lines"], row["amount"]) for row in store.state_rows(pipeline.spec.states[0])}
        slices = [set(store.source_metadata("conformance", txid)["inputs"]) for txid in range(1, 5)]
    assert found == {name: (lines[name], amounts[name]) for name in lines}
    assert slices == [{"web", "app", "folder"}, {"web"}, {"app", "folder"}, {"web"}]
