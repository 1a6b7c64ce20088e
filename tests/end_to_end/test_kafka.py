"""Exactly-once from a topic to a state, through a real Airflow and a broker that dies and gets a partition on the way.

A million messages.
"""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from tests.end_to_end.conftest import Project, wait_for
from tests.servers import fetch_kafka
from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.state_store import Settings

MESSAGES = 1_000_000
PER_BATCH = MESSAGES // 10
FIRST_TXIDS = [1, 2, 3, 4, 5]  # of the first half; the last of them has to wait until another is processed
PARTITIONS = 8
TOPIC = "readings"
SENSORS = 101
LAST_MESSAGES = 99  # fewer than a batch takes
SECONDS = 60
PATIENCE_SECONDS = 600  # the first batches, several at once, in a Spark that has just started
RUN_SECONDS = 3000

PIPELINE = f'''
"""Readings per sensor and partition."""

from tidegate.jobs import Count, Kafka, Max, Min, Pipeline, State, Sum


def numbers(rows):
    return rows.selectExpr(
        "`partition`", "cast(key AS string) AS sensor", "cast(cast(value AS string) AS int) AS reading", "`offset`"
    )


PIPELINE = Pipeline(
    name="readings",
    source=Kafka("{TOPIC}", max_records={PER_BATCH}),
    transform=numbers,
    states={{
        "per_sensor": State(
            key={{"partition": "integer", "sensor": "text"}},
            aggregates={{"readings": Count(), "total": Sum("reading"), "first": Min("offset"), "last": Max("offset")}},
        ),
    }},
)
'''
DAG = '''
"""Runs when triggered."""

from tidegate.dags.batch_dag import batch_dag

dag = batch_dag("readings")
'''

pytestmark = pytest.mark.soak


@dataclass
class Readings:
    """The test's own topic, and the messages that its brokers have confirmed, which have to be counted."""

    settings: Settings
    per_sensor: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    offsets: dict[int, set[int]] = field(default_factory=dict)
    errors: list[KafkaError] = field(default_factory=list)
    sent: int = 0

    def __post_init__(self) -> None:
        self.login = {**kafka_client(self.settings), "log_level": 0}
        self.admin = AdminClient(self.login)

    def create(self) -> None:
        """Create the topic."""
        self.admin.create_topics([NewTopic(TOPIC, PARTITIONS, replication_factor=1)])[TOPIC].result(SECONDS)

    def add_a_partition(self) -> None:
        """Add one partition to the topic."""
        self.admin.create_partitions([NewPartitions(TOPIC, PARTITIONS + 1)])[TOPIC].result(SECONDS)

        def has_a_leader() -> bool:
            known = self.admin.list_topics(TOPIC, SECONDS).topics[TOPIC].partitions
            return len(known) == PARTITIONS + 1 and all(partition.leader >= 0 for partition in known.values())

        wait_for(has_a_leader, "a ninth partition")

    def produce(self, count: int, partitions: int = PARTITIONS) -> None:
        """Write messages to each partition in turn, and wait until all are confirmed, however long brokers are away.

        The producer is idempotent: a message that it sends again after a broker's death is stored once.
        """
        producer = Producer({**self.login, "enable.idempotence": True, "delivery.timeout.ms": RUN_SECONDS * 1000})
        for number in range(self.sent, self.sent + count):
            message = {"key": f"sensor {number * 7919 % SENSORS}", "value": str(number * 31 % 10_007 - 5_000)}
            while True:
                try:
                    producer.produce(TOPIC, partition=number % partitions, on_delivery=self._confirm, **message)
                    break
                except BufferError:
                    producer.poll(1)
            producer.poll(0)
        self.sent += count
        assert producer.flush(RUN_SECONDS) == 0
        assert self.errors == []

    def _confirm(self, error: KafkaError | None, message: Message) -> None:
        if error:
            self.errors.append(error)
            return
        partition, offset, reading = message.partition(), message.offset(), int(message.value())
        offsets = self.offsets.setdefault(partition, set())
        assert offset not in offsets
        offsets.add(offset)
        found = self.per_sensor.setdefault((partition, message.key().decode()), [0, 0, offset, offset])
        found[:] = [found[0] + 1, found[1] + reading, min(found[2], offset), max(found[3], offset)]

    def ends(self) -> dict[int, int]:
        """Return where each partition ends, after checking that it holds each confirmed message once."""
        consumer = Consumer({**self.login, "group.id": "a test that only looks"})
        try:
            ends = {p: consumer.get_watermark_offsets(TopicPartition(TOPIC, p), SECONDS)[1] for p in self.offsets}
        finally:
            consumer.close()
        assert self.offsets == {partition: set(range(end)) for partition, end in ends.items()}
        return ends

    def committed_by_the_group(self) -> dict[int, int]:
        """Return the offsets of the pipeline's consumer group, as lag tools see them."""
        consumer = Consumer({**self.login, "group.id": "tidegate-readings"})
        try:
            requested = [TopicPartition(TOPIC, partition) for partition in self.offsets]
            return {found.partition: found.offset for found in consumer.committed(requested, SECONDS)}
        finally:
            consumer.close()


@dataclass
class KafkaProject(Project):
    """A project with a pipeline over a topic, and its stack."""

    def run(self) -> dict[str, Any]:
        """Run the Dag; return its outcome."""
        return self.ended(self.start("trigger", "readings", "--wait"))

    def ended(self, run: subprocess.Popen[str]) -> dict[str, Any]:
        """Wait for the end of a run, which has to succeed; return its outcome."""
        out, err = run.communicate(timeout=RUN_SECONDS)
        assert run.returncode == 0, err
        return dict(json.loads(out))

    def batches(self) -> list[dict[str, Any]]:
        """Return the metadata of each batch, in the order of their txids."""
        found = self.ask("SELECT source_metadata FROM tidegate.batch WHERE pipeline = 'readings' ORDER BY txid")
        return [json.loads(bytes(frozen))["metadata"] for (frozen,) in found]

    def processed(self) -> int:
        """Return how many batches have been processed."""
        return int(self.ask("SELECT count(DISTINCT txid) FROM tidegate.seal WHERE pipeline = 'readings'")[0][0])

    def kafka(self) -> dict[str, Any]:
        """Return the broker's status."""
        return next(component for component in self.json("status")["components"] if component["name"] == "kafka")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaProject]:
    """The project, with a running stack that has Kafka, and with its pipeline's tables."""
    fetch_kafka()
    home = tmp_path_factory.mktemp("readings")
    project = KafkaProject(home, home, Settings())
    project.tidegate("init", ".")
    try:
        project.tidegate("up", "--with", "kafka")
        (home / "pipelines" / "readings.py").write_text(PIPELINE)
        (home / "dags" / "readings.py").write_text(DAG)
        project.tidegate("migrate", "--new", "readings per sensor and partition")
        project.tidegate("migrate")
        project.settings = Settings.load({**os.environ, "TIDEGATE_HOME": str(home)})
        yield project
    finally:
        project.tidegate("down", "--delete-data", "--yes")


@pytest.mark.timeout(RUN_SECONDS * 2)
def test_every_message_counts_once_though_the_broker_dies_and_a_partition_is_added(shop: KafkaProject) -> None:
    """Half of them exist before the first run; the broker is killed in the middle of it, while others arrive."""
    topic = Readings(shop.settings)
    topic.create()
    topic.produce(MESSAGES // 2)

    more = threading.Thread(target=topic.produce, args=[MESSAGES // 4], daemon=True)
    broker = psutil.Process(shop.kafka()["pid"])
    run = shop.start("trigger", "readings", "--wait")
    with shop.held("commit"):
        wait_for(shop.batches, "planning")
        wait_for(shop.processed, "processing of a batch", seconds=PATIENCE_SECONDS)
        more.start()
        broker.kill()
        assert shop.processed() < len(FIRST_TXIDS)
    more.join(RUN_SECONDS)
    assert not more.is_alive()
    topic.add_a_partition()
    topic.produce(MESSAGES // 4 - LAST_MESSAGES, PARTITIONS + 1)
    assert shop.ended(run)["committed"] == FIRST_TXIDS
    assert shop.kafka()["restarts"] == 1

    shop.run()
    # The acks of two commits may overtake each other; that of the last batch, alone in its run, cannot be overtaken.
    topic.produce(LAST_MESSAGES, PARTITIONS + 1)
    assert len(shop.run()["committed"]) == 1

    assert topic.sent == MESSAGES
    ends = topic.ends()
    assert set(ends) == set(range(PARTITIONS + 1))
    assert sum(ends.values()) == MESSAGES
    rows = shop.json("inspect", "readings", "--state", "per_sensor")
    counted = {(r["partition"], r["sensor"]): [r["readings"], r["total"], r["first"], r["last"]] for r in rows}
    assert counted == topic.per_sensor

    assert positions(shop.batches()) == ends
    assert topic.committed_by_the_group() == ends
    assert sum(batch["source_rows"] for batch in shop.json("inspect", "readings")) == MESSAGES


def positions(batches: list[dict[str, Any]]) -> dict[int, int]:
    """Return where the last batch ends, after checking that each begins where earlier ones ended."""
    reached: dict[int, int] = {}
    for metadata in batches:
        for name, found in metadata["partitions"].items():
            assert found["start"] == reached.get(int(name), 0)
            assert found["end"] > found["start"]
            reached[int(name)] = found["end"]
        for name, found in metadata["idle"].items():
            assert found["end"] == reached[int(name)]
    return reached
