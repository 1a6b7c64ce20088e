"""A partition whose broker has died, with a stack of the module's own: in `make soak`."""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lone_stack import kafka_stack
from tests.servers import Server
from tests.sources.topics import SECONDS, OrdersTopic, place, ranges, topic
from tests.store import Attempt
from tidegate.stack.components.server_process import wait_until
from tidegate.stack.layout import Layout
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import PartitionUnavailable, SourceUnavailable

__all__ = ["kafka_stack", "place", "topic"]  # fixtures

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def server(kafka_stack: Settings) -> Server:
    return Server(kafka_stack)


@contextmanager
def second_broker(stack: Settings, folder: Path, port: int) -> Iterator[subprocess.Popen]:
    """Let a second broker, with the properties of the stack's but for its place, join the cluster; it is killed at the end."""
    (cluster,) = re.findall(r"cluster\.id=(.*)", (stack.stack_folder / "kafka/data/meta.properties").read_text())
    *java, main, file = Layout.load(stack.home).kafka.component().command
    address = f"CLIENT://127.0.0.1:{port}"
    properties = dict(line.split("=", 1) for line in Path(file).read_text().splitlines()) | {
        "node.id": "2",
        "process.roles": "broker",
        "listeners": address,
        "advertised.listeners": address,
        "log.dirs": str(folder / "data"),
    }
    second = folder / "second.properties"
    second.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    formatting = [*java, "kafka.tools.StorageTool", "format", "--config", second, "--cluster-id", cluster]
    subprocess.run(formatting, check=True, capture_output=True)
    with (folder / "second.log").open("wb") as log, subprocess.Popen([*java, main, second], stdout=log, stderr=log) as broker:
        try:
            yield broker
        finally:
            broker.kill()


@pytest.mark.promise("error:PARTITION_UNAVAILABLE")
def test_a_partition_without_a_leader_stops_a_transactional_source_only(
    topic: OrdersTopic, kafka_stack: Settings, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    topic.transaction(0, commit=True)  # Kafka's own topics come into being on the broker that stays
    topic.plan(topic.source())
    topic.source(group=topic.name).ack(Attempt("orders", 1, 1, {**topic.plan(topic.source(start="latest"))}), topic.settings)
    with second_broker(kafka_stack, tmp_path, free_port()) as broker:
        assert wait_until(lambda: len(topic.admin.list_topics(timeout=SECONDS).brokers) == 2, SECONDS)
        topic.delete()
        topic.create(2, [[1], [2]])
        topic.produce(3, 0)
        topic.produce(3, 1)
        first = topic.plan(topic.source(max_records=4))
        assert ranges(first) == {"0": (0, 2), "1": (0, 2)}
        broker.kill()

        def leaderless() -> bool:
            known = topic.admin.list_topics(topic.name, timeout=SECONDS).topics[topic.name].partitions
            return known[1].leader == -1

        assert wait_until(leaderless, SECONDS)
    transactional, opaque = topic.source(), topic.source(kind="opaque")
    with pytest.raises(PartitionUnavailable, match=r"Partition 1 of topic .* has no leader"):
        topic.plan(transactional, first, txid=2)
    with pytest.raises(PartitionUnavailable, match=r"Partition 1 of topic .* has no leader"):
        topic.read(transactional, first)
    with pytest.raises(SourceUnavailable, match="The first batch needs all"):
        topic.plan(opaque)
    second = topic.plan(opaque, first, txid=2)
    assert ranges(second) == {"0": (2, 3)}
    assert {"start": 0, "end": 2, "leader_epoch": 0}.items() <= second["idle"]["1"].items()
    assert topic.read(opaque, second) == [row for row in topic.produced if row[:2] == (0, 2)]
    assert ranges(topic.plan(opaque, None, first)) == {"0": (0, 3)}
