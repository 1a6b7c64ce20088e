"""Brokers of a test's own: partitions without a leader, and logs that are cut and grow again, as after an unclean election."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tests.sources.topics import SECONDS, OrdersTopic, ranges
from tests.store import Attempt
from tidegate.jobs.sources.binding import emitter_of
from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.stack.components.kafka import EmbeddedKafka
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import PartitionUnavailable, SourceChanged, SourceUnavailable

INDEXES = ("*.index", "*.timeindex", "*.snapshot", "leader-epoch-checkpoint")
OF_BROKER = ("*-offset-checkpoint", ".kafka_cleanshutdown")


class Broker:
    """A broker of the test's own, without a supervisor that would start it again."""

    def __init__(self, folder: Path, free_port: Callable[[], int]) -> None:
        self.kafka = EmbeddedKafka(folder, {"kafka": free_port(), "kafka_controller": free_port()})
        self.kafka.initialize()
        self.settings = Settings(
            home=folder, kafka_bootstrap=self.kafka.bootstrap, kafka_properties_file=self.kafka.client_properties
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        started = self.kafka.component()
        log = (self.kafka.folder / "log").open("ab")
        with log, subprocess.Popen(started.command, env=os.environ | started.environment, stdout=log, stderr=log) as broker:
            try:
                assert wait_until(self._answers, SECONDS)
                yield
            finally:
                broker.send_signal(signal.SIGTERM)

    def _answers(self) -> bool:
        try:
            return bool(AdminClient({**kafka_client(self.settings), "log_level": 0}).list_topics(timeout=1).brokers)
        except KafkaException:
            return False

    def cut(self, topic: str, offset: int) -> None:
        """Cut the log of the topic's first partition before the batch of records at an offset, as if the rest never arrived."""
        data = self.kafka.folder / "data"
        (log,) = (data / f"{topic}-0").glob("*.log")
        content, position = log.read_bytes(), 0
        while int.from_bytes(content[position : position + 8]) < offset:  # a batch begins with its first offset and its length
            position += 12 + int.from_bytes(content[position + 8 : position + 12])
        os.truncate(log, position)
        for folder, names in ((log.parent, INDEXES), (data, OF_BROKER)):
            for file in (file for name in names for file in folder.glob(name)):
                file.unlink()

    @contextmanager
    def beside(self, folder: Path, port: int) -> Iterator[subprocess.Popen]:
        """Let a second broker, with the same properties but for its place, join the cluster; it is killed at the end."""
        (cluster,) = re.findall(r"cluster\.id=(.*)", (self.kafka.folder / "data/meta.properties").read_text())
        *java, main, file = self.kafka.component().command
        address = f"CLIENT://127.0.0.1:{port}"
        properties = dict(line.split("=", 1) for line in Path(file).read_text().splitlines()) | {
            **{"node.id": "2", "process.roles": "broker", "log.dirs": str(folder / "data")},
            **{"listeners": address, "advertised.listeners": address},
        }
        second = folder / "second.properties"
        second.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        formatting = [*java, "kafka.tools.StorageTool", "format", "--config", second, "--cluster-id", cluster]
        subprocess.run(formatting, check=True, capture_output=True)
        with (
            (folder / "second.log").open("wb") as log,
            subprocess.Popen([*java, main, second], stdout=log, stderr=log) as broker,
        ):
            try:
                yield broker
            finally:
                broker.kill()


@pytest.fixture
def broker(tmp_path: Path, free_port: Callable[[], int]) -> Broker:
    return Broker(tmp_path, free_port)


@pytest.mark.soak
@pytest.mark.promise("error:PARTITION_UNAVAILABLE")
def test_a_partition_without_a_leader_stops_a_transactional_source_only(
    broker: Broker, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    (folder := tmp_path / "second").mkdir()
    with broker.running():
        topic = OrdersTopic(broker.settings)
        topic.transaction(0, commit=True)  # Kafka's own topics come into being on the broker that stays
        topic.source(group=topic.name).ack(Attempt("orders", 1, 1, topic.plan(topic.source(start="latest"))), topic.settings)
        with broker.beside(folder, free_port()) as second:
            assert wait_until(lambda: len(topic.admin.list_topics(timeout=SECONDS).brokers) == 2, SECONDS)
            topic.delete()
            topic.create(2, [[1], [2]])
            topic.produce(3, 3)
            first = topic.plan(topic.source(max_records=4))
            assert ranges(first) == {"0": (0, 2), "1": (0, 2)}
            second.kill()
            known = topic.admin.list_topics
            assert wait_until(lambda: known(topic.name, SECONDS).topics[topic.name].partitions[1].leader == -1, SECONDS)
        transactional, opaque = topic.source(), topic.source(kind="opaque")
        has_none = r"Partition 1 of topic .* has no leader"
        topic.unplanned(transactional, first, error=PartitionUnavailable, match=has_none)
        topic.refused(transactional, first, PartitionUnavailable, has_none)
        topic.unplanned(opaque, error=SourceUnavailable, match="The first batch needs all")
        following = topic.plan(opaque, first)
        assert ranges(following) == {"0": (2, 3)}
        assert {"start": 0, "end": 2, "leader_epoch": 0}.items() <= following["idle"]["1"].items()
        assert ranges(topic.plan(opaque, None, first)) == {"0": (0, 3)}


@pytest.mark.promise("I11")
def test_records_in_the_place_of_lost_ones_are_not_passed_over(broker: Broker) -> None:
    with broker.running():
        topic, whole, late = OrdersTopic(broker.settings, partitions=2), *(OrdersTopic(broker.settings, 1) for _ in range(2))
        topic.produce(0, 3)
        for count in (10, 3):
            for each in (topic, whole, late):
                each.produce(count)
        planned = topic.plan(topic.source())
        assert ranges(planned) == {"0": (0, 13), "1": (0, 3)}
        read, begun = whole.plan(whole.source()), late.plan(late.source(start="latest"))
        assert ranges(begun) == {}
    for each in (topic, late):
        broker.cut(each.name, 10)
    with broker.running():
        for count in (2, 3):
            topic.produce(count)
            late.produce(count)
        cut = "planned up to offset 13.*broker end offset is 10"
        for kind, plans in (("transactional", (begun, None)), ("opaque", (begun, None)), ("opaque", (None, begun))):
            late.unplanned(late.source(start="latest", kind=kind), *plans, match=cut)
        now = topic.plan(topic.source())["partitions"]["0"]["leader_epoch"]
        for source in (topic.source(), topic.source(kind="opaque")):
            topic.unplanned(source, planned, match=f"Partition 0 of topic .* {cut}.*generation=2")
            # Services without leader epochs; brokers whose disks were put back, and whose epochs have come to the same number.
            for epoch in ({}, {"leader_epoch": now}):
                known = {at: value for at, value in planned["partitions"]["0"].items() if at != "leader_epoch"} | epoch
                restored = planned | {"partitions": planned["partitions"] | {"0": known}}
                topic.unplanned(source, restored, match="up to offset 13.*the record at offset 12 is another one now")
            emitter, attempt = emitter_of(source, None, topic.settings), Attempt("orders", 1, 1, planned)
            with pytest.raises(SourceChanged, match=r"this batch was planned up to offset 13.*generation=2.*skip orders 1 "):
                emitter.verify_batch(attempt, planned)
        assert ranges(topic.plan(topic.source(generation=2), planned))["0"][1] == 15
        older = read | {"partitions": {"0": read["partitions"]["0"] | {"leader_epoch": 1000}}}
        whole.unplanned(whole.source(), older, match=r"they are an older copy \(leader epoch 1000, now \d+\)")
        whole.produce(1)
        whole.expire(5)
        assert ranges(whole.plan(whole.source(), read)) == {"0": (13, 14)}
