"""A partition's log that is cut and grows again, as after an unclean election: others have the offsets that were read."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tests.sources.topics import OrdersTopic, ranges
from tests.store import Attempt
from tidegate.jobs.sources.binding import emitter_of
from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.stack.components.kafka import EmbeddedKafka
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SourceChanged

SECONDS = 60
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


@pytest.mark.promise("I11")
def test_records_in_the_place_of_lost_ones_are_not_passed_over(tmp_path: Path, free_port: Callable[[], int]) -> None:
    broker = Broker(tmp_path, free_port)
    with broker.running():
        topic, whole, late = OrdersTopic(broker.settings, partitions=2), *(OrdersTopic(broker.settings, 1) for _ in range(2))
        topic.produce(3, partition=1)
        for count in (10, 3):
            for each in (topic, whole, late):
                each.produce(count)
        source = topic.source()
        planned = topic.plan(source)
        assert ranges(planned) == {"0": (0, 13), "1": (0, 3)}
        read, begun = whole.plan(whole.source()), late.plan(late.source(start="latest"))
        assert ranges(begun) == {}
    for cut in (topic, late):
        broker.cut(cut.name, 10)
    with broker.running():
        for count in (2, 3):
            topic.produce(count)
            late.produce(count)
        for kind, plans in (("transactional", (begun, None)), ("opaque", (begun, None)), ("opaque", (None, begun))):
            with pytest.raises(SourceChanged, match=r"planned up to offset 13.*broker end offset is 10"):
                late.plan(late.source(start="latest", kind=kind), *plans)
        now = topic.plan(topic.source())["partitions"]["0"]["leader_epoch"]
        for kind in ("transactional", "opaque"):
            with pytest.raises(
                SourceChanged, match=r"Partition 0 of topic .* planned up to offset 13.*broker end offset is 10.*generation=2"
            ):
                topic.plan(topic.source(kind=kind), planned, txid=2)
            # Services without leader epochs; brokers whose disks were put back, and whose epochs have come to the same number.
            for epoch in ({}, {"leader_epoch": now}):
                known = {at: value for at, value in planned["partitions"]["0"].items() if at != "leader_epoch"} | epoch
                restored = planned | {"partitions": planned["partitions"] | {"0": known}}
                with pytest.raises(SourceChanged, match=r"planned up to offset 13.*the record at offset 12 is another one now"):
                    topic.plan(topic.source(kind=kind), restored, txid=2)
            with pytest.raises(
                SourceChanged, match=r"this batch was planned up to offset 13.*generation=2.*tidegate skip orders 1 "
            ):
                emitter_of(topic.source(kind=kind), None, topic.settings).verify_batch(
                    Attempt("orders", 1, 1, planned), planned
                )
        assert ranges(topic.plan(topic.source(generation=2), planned, txid=2))["0"][1] == 15
        older = read | {"partitions": {"0": read["partitions"]["0"] | {"leader_epoch": 1000}}}
        with pytest.raises(SourceChanged, match=r"they are an older copy \(leader epoch 1000, now \d+\)"):
            whole.plan(whole.source(), older, txid=2)
        whole.produce(1)
        whole.expire(5)
        assert ranges(whole.plan(whole.source(), read, txid=2)) == {"0": (13, 14)}
