"""Exactly-once from a topic to a state, through a real Airflow and a broker that dies and gets a partition on the way."""

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from confluent_kafka import Producer

from tests.end_to_end.conftest import Project, wait_for
from tests.servers import fetch_kafka
from tests.sources.topics import OrdersTopic
from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.state_store import Settings

PARTITIONS = 4
OF_EACH = 10_000  # messages of a partition before the first run
BATCHES = [1, 2, 3, 4, 5]  # of the first run
SECONDS = 600

PIPELINE = """
from tidegate.jobs import Count, Kafka, Max, Min, Pipeline, State

PIPELINE = Pipeline(
    name="orders",
    source=Kafka("{topic}", max_records={records}),
    transform=lambda rows: rows.selectExpr("`partition`", "cast(value AS string) AS shop", "`offset`"),
    states={{
        "per_shop": State(
            key={{"partition": "integer", "shop": "text"}},
            aggregates={{"orders": Count(), "first": Min("offset"), "last": Max("offset")}},
        )
    }},
)
"""
DAG = 'from tidegate.dags.batch_dag import batch_dag\n\ndag = batch_dag("orders")\n'

pytestmark = pytest.mark.soak


@pytest.fixture
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    fetch_kafka()
    home = tmp_path_factory.mktemp("orders")
    made = Project(home, home, Settings())
    made.tidegate("init", ".")
    try:
        made.tidegate("up", "--with", "kafka")
        made.settings = Settings.load({**os.environ, "TIDEGATE_HOME": str(home)})
        yield made
    finally:
        made.tidegate("down", "--delete-data", "--yes")


@pytest.mark.timeout(1800)
def test_every_message_counts_once_though_the_broker_dies_and_a_partition_is_added(project: Project) -> None:
    topic = OrdersTopic(project.settings, PARTITIONS)
    # A message that an idempotent producer sends again after the broker's death is stored once.
    topic.producer = Producer({**kafka_client(project.settings), "enable.idempotence": True, "log_level": 0})
    (project.home / "pipelines/orders.py").write_text(
        PIPELINE.format(topic=topic.name, records=PARTITIONS * OF_EACH // len(BATCHES))
    )
    (project.home / "dags/orders.py").write_text(DAG)
    project.tidegate("migrate", "--new", "orders per shop and partition")
    project.tidegate("migrate")

    def produce(count: int, partitions: int = PARTITIONS) -> None:
        for partition in range(partitions):
            topic.produce(count, partition)

    def batches() -> list[dict[str, Any]]:
        found = project.ask("SELECT source_metadata FROM tidegate.batch WHERE pipeline = 'orders' ORDER BY txid")
        return [json.loads(bytes(frozen))["metadata"]["partitions"] for (frozen,) in found]

    def processed() -> int:
        return int(project.ask("SELECT count(DISTINCT txid) FROM tidegate.seal WHERE pipeline = 'orders'")[0][0])

    def broker() -> dict[str, Any]:
        return next(component for component in project.json("status")["components"] if component["name"] == "kafka")

    produce(OF_EACH)
    more = threading.Thread(target=produce, args=[OF_EACH // 4], daemon=True)
    run = project.start("trigger", "orders", "--wait")
    with project.held("commit"):
        wait_for(processed, "processing of a batch", seconds=SECONDS)
        more.start()
        psutil.Process(broker()["pid"]).kill()
        assert processed() < len(BATCHES)
    more.join(SECONDS)
    assert not more.is_alive()
    topic.add_partitions(PARTITIONS + 1)
    produce(OF_EACH // 4, PARTITIONS + 1)
    out, problem = run.communicate(timeout=SECONDS)
    assert json.loads(out)["committed"] == BATCHES, problem
    assert broker()["restarts"] == 1
    project.tidegate("trigger", "orders", "--wait")

    expected: dict[tuple[int, str], list[int]] = {}
    for partition, offset, shop in topic.produced:
        found = expected.setdefault((partition, shop), [0, offset, offset])
        found[:] = [found[0] + 1, min(found[1], offset), max(found[2], offset)]
    rows = project.json("inspect", "orders", "--state", "per_shop")
    assert {(row["partition"], row["shop"]): [row["orders"], row["first"], row["last"]] for row in rows} == expected
    reached: dict[str, int] = {}
    for of_batch in batches():  # each begins where earlier ones ended
        assert {name: found["start"] for name, found in of_batch.items()} == {name: reached.get(name, 0) for name in of_batch}
        reached |= {name: found["end"] for name, found in of_batch.items()}
    ends = [OF_EACH + OF_EACH // 4 + OF_EACH // 4] * PARTITIONS + [OF_EACH // 4]
    assert reached == {str(partition): end for partition, end in enumerate(ends)}
