"""The Kafka source, on a real broker, reads each record exactly once or raises a named error."""

import io
import json
import os
import random
import re
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from tests.crashes import IN_FULL
from tests.servers import QUICK_TO_START, Server
from tests.sources.feeds import Feed
from tests.sources.in_process import batches, plan, raises
from tests.store import Attempt, errors
from tidegate.jobs import Kafka
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.sources.binding import coordinator_of, emitter_of
from tidegate.jobs.sources.kafka import read
from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.jobs.sources.kafka.plan import fair_shares
from tidegate.jobs.testing import PROMISES, Bench, NotPossible
from tidegate.stack.components.kafka import EmbeddedKafka
from tidegate.stack.components.server_process import start, wait_until
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import RangeExpired, SourceChanged, SourceUnavailable, SourceUnreadable, TidegateError

SECONDS = 60
Row = tuple[int, int, str]


class OrdersTopic:
    def __init__(self, settings: Settings, partitions: int = 2, **config: str) -> None:
        self.settings = settings
        self.name = f"orders.{uuid.uuid4().hex[:12]}"
        self.admin = AdminClient({**kafka_client(settings), "log_level": 0})
        self.producer = self._new_producer()
        self.produced: list[Row] = []
        self.create(partitions, **config)

    def create(self, partitions: int, brokers: list[list[int]] | None = None, **config: str) -> None:
        """Create the topic, on these brokers or on any, and wait until it is known."""
        where = {"replica_assignment": brokers} if brokers else {"replication_factor": 1}
        kept = {"retention.ms": "-1"} | config  # whatever time its records have
        self.admin.create_topics([NewTopic(self.name, partitions, config=kept, **where)])[self.name].result(SECONDS)
        assert wait_until(lambda: self.name in self.admin.list_topics(timeout=SECONDS).topics, SECONDS)

    def delete(self) -> None:
        self.admin.delete_topics([self.name])[self.name].result(SECONDS)
        assert wait_until(lambda: self.name not in self.admin.list_topics(timeout=SECONDS).topics, SECONDS)

    def add_partitions(self, total: int) -> None:
        self.admin.create_partitions([NewPartitions(self.name, total)])[self.name].result(SECONDS)
        known = self.admin.list_topics
        assert wait_until(lambda: len(known(self.name, SECONDS).topics[self.name].partitions) == total, SECONDS)
        self.producer = self._new_producer()  # the old producer remembers the old number

    def _new_producer(self) -> Producer:
        return Producer({**kafka_client(self.settings), "linger.ms": 0, "log_level": 0})

    def produce(self, *counts: int, timestamp: datetime | None = None, key: str | None = None) -> None:
        def remember(error: object, message: Any) -> None:
            assert error is None
            self.produced.append((message.partition(), message.offset(), message.value().decode()))

        moment = {"timestamp": int(timestamp.timestamp() * 1000)} if timestamp else {}
        for partition, count in enumerate(counts):
            for _ in range(count):
                value = f"shop {random.randrange(5)}"
                self.producer.produce(self.name, value, key, partition=partition, on_delivery=remember, **moment)
        assert self.producer.flush(SECONDS) == 0

    def expire(self, before: int, partition: int = 0) -> None:
        end = TopicPartition(self.name, partition, before)
        self.admin.delete_records([end])[end].result(SECONDS)

    def transaction(self, count: int, *, commit: bool) -> None:
        self.end(self.open_transaction(count), commit=commit)

    def end(self, producer: Producer, *, commit: bool) -> None:
        """End a transaction and wait for its mark in the topic: brokers answer before they write it."""
        producer.commit_transaction(SECONDS) if commit else producer.abort_transaction(SECONDS)
        assert wait_until(lambda: self.source().held_back(self.settings) is None, SECONDS)

    def open_transaction(self, count: int) -> Producer:
        """Write records in a transaction that stays open until the caller ends it."""
        producer = Producer({**kafka_client(self.settings), "transactional.id": uuid.uuid4().hex, "log_level": 0})
        producer.init_transactions(SECONDS)
        producer.begin_transaction()
        for _ in range(count):
            producer.produce(self.name, "in a transaction", partition=0)
        assert producer.flush(SECONDS) == 0
        return producer

    def source(self, **changes: Any) -> Kafka:
        return Kafka(self.name, **changes)

    def plan(self, source: Kafka, previous: Any = None, current: Any = None) -> Any:
        """Plan one batch with one look at the topic, frozen as by the ledger."""
        return json.loads(json.dumps(plan(self.settings, source, previous, current)))

    def unplanned(self, source: Kafka, *plans: Any, match: str, error: type[TidegateError] = SourceChanged) -> None:
        """Check that no batch is planned after these batches, and why."""
        raises(error, lambda: self.plan(source, *plans), match)

    def refused(self, source: Kafka, metadata: dict, error: type[TidegateError], match: str, at: str = "emit_batch") -> str:
        """Check that a batch is refused, by default before Spark reads anything; return the error's line."""
        step = getattr(emitter_of(source, None, self.settings), at)
        return raises(error, lambda: step(Attempt("orders", 1, 1, metadata), metadata), match)

    def read(self, source: Kafka, metadata: dict, meddle: Callable[[], None] = lambda: None) -> list[Row]:
        """Read a batch with Spark, verify it, and return its rows. It raises the pipeline's errors."""
        attempt = Attempt("orders", 1, 1, metadata)
        with spark_session(self.settings, "orders") as spark:
            emitter = emitter_of(source, spark, self.settings)
            try:
                rows = emitter.emit_batch(attempt, metadata)
                meddle()
                found = [(row.partition, row.offset, bytes(row.value).decode()) for row in rows.collect()]
            except PySparkException as error:
                raise emitter.explain(error) or error from error
            emitter.verify_batch(attempt, metadata)
        return sorted(found)


def ranges(metadata: Any) -> dict[str, tuple[int, int]]:
    return {name: (found["start"], found["end"]) for name, found in metadata["partitions"].items()}


@pytest.fixture(scope="session")
def server(kafka_stack: Settings) -> Server:
    """The Postgres server of the run, with settings that lead to its broker."""
    return Server(kafka_stack)


@pytest.fixture
def topic(shops: Settings, tmp_path: Path) -> OrdersTopic:
    return OrdersTopic(replace(shops, home=tmp_path))


BOTH_KINDS = pytest.mark.parametrize("kind", ["transactional", "opaque"])
NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


class KafkaFeed(Feed):
    """A topic of two partitions, two records a batch; no record can be changed, and leaders have tests of their own."""

    def __init__(self, settings: Settings, kind: Any) -> None:
        self._topic = OrdersTopic(settings)
        self.source = self._topic.source(kind=kind, max_records=2)

    def add(self, rows: list[tuple]) -> list[tuple]:
        put: list[tuple] = []

        def confirmed(error: Any, message: Any) -> None:
            assert error is None, error
            when = datetime.fromtimestamp(message.timestamp()[1] / 1000)
            place = (message.topic(), message.partition(), message.offset())
            put.append((bytes(message.key()), bytes(message.value()), *place, when))

        for name, number in rows:
            self._topic.producer.produce(self._topic.name, str(number), name, number % 2, confirmed)
        assert self._topic.producer.flush(SECONDS) == 0
        return put


@BOTH_KINDS
def test_kafka_keeps_its_promises(settings: Settings, kind: Any) -> None:
    """All of them at full size: fuzzed and crashed pipelines read each record once in any run."""
    with spark_session(settings, "orders") as spark:
        for name, holds in PROMISES[kind].items():
            if IN_FULL or name in ("a_replay_has_the_identical_rows", "records_are_the_rows"):
                with suppress(NotPossible) if name.startswith(("a_changed", "what_is_hidden")) else nullcontext():
                    holds(Bench(KafkaFeed(settings, kind), spark, settings))


def test_shares_are_fair() -> None:
    dice = random.Random(1)
    for number in range(1000):
        most = (1, 3, 10, 100)[number % 4]
        lags = {str(number): dice.choice([0, 0, 1, 2, 5, 50, 5000]) for number in range(dice.randrange(1, 13))}
        shares = fair_shares(lags, most)
        assert sum(shares.values()) == min(most, sum(lags.values()))
        assert all(1 <= share <= lags[name] for name, share in shares.items())
        assert len(shares) == min(most, sum(lag > 0 for lag in lags.values()))
        assert shares == fair_shares(dict(reversed(lags.items())), most)
    assert fair_shares({"0": 900, "1": 100}, 10) == {"0": 9, "1": 1}
    assert fair_shares({"0": 5, "1": 1, "2": 7}, 2) == {"0": 1, "2": 1}


def test_a_time_is_the_first_record_at_or_after_it(topic: OrdersTopic) -> None:
    for minutes in (-2, -1, 0, 1):
        topic.produce(1, timestamp=NOON + timedelta(minutes=minutes))
    topic.produce(0, 3, timestamp=NOON - timedelta(minutes=5))
    source = topic.source(start=NOON)
    first = topic.plan(source)
    topic.produce(0, 1, timestamp=NOON - timedelta(minutes=3))
    assert ranges(first) == {"0": (2, 4)}
    assert ranges(topic.plan(source, first)) == {"1": (3, 4)}
    assert ranges(topic.plan(topic.source(start=NOON + timedelta(microseconds=1)))) == {"0": (3, 4)}
    assert topic.plan(topic.source(start=NOON + timedelta(hours=1))) is None
    for before in (timedelta(milliseconds=1), timedelta(milliseconds=2), timedelta(days=3650)):  # -1 is the end for Kafka
        assert ranges(topic.plan(topic.source(start=datetime(1970, 1, 1, tzinfo=UTC) - before))) == {"0": (0, 4), "1": (0, 4)}


def test_a_start_at_the_end_keeps_its_place_and_a_new_partition_begins_at_its_first_record(topic: OrdersTopic) -> None:
    source = topic.source(kind="opaque", start="latest")
    topic.produce(3)
    first = topic.plan(source)
    assert ranges(first) == {}
    topic.produce(2)
    topic.add_partitions(3)
    topic.produce(0, 0, 4)
    second = topic.plan(source, first)
    assert ranges(second) == ranges(topic.plan(source, None, first)) == {"0": (3, 5), "2": (0, 4)}
    assert topic.plan(source, second) is None
    topic.produce(2)
    assert ranges(topic.plan(source, first, second)) == {"0": (3, 7), "2": (0, 4)}


@pytest.mark.promise("error:RANGE_EXPIRED", "decision:0016")
@BOTH_KINDS
def test_expired_records_are_a_batch_that_fails_by_name(topic: OrdersTopic, kind: str) -> None:
    source = topic.source(kind=kind)
    topic.produce(3)
    first = topic.plan(source)
    topic.produce(5, 2)
    topic.expire(6)
    expired = topic.plan(source, first)
    assert ranges(expired) == {"0": (3, 6)}, "nothing else is given up with it"
    of = rf"Partition 0 of topic {topic.name}: of offsets 3 to 6, 3 have expired"
    assert 'tidegate skip orders 1 --reason "..."' in topic.refused(source, expired, RangeExpired, of)
    last = topic.plan(source, expired)
    assert ranges(last) == {"0": (6, 8), "1": (0, 2)}
    topic.expire(7)
    message = topic.refused(source, last, RangeExpired, "of offsets 6 to 8, 1 have expired")
    assert "The batch has 4 offsets, and 3 of them can still be read" in message  # a person decides whether to give them up
    assert "partition 0 from 7 to 8, partition 1 from 0 to 2" in message


def test_an_opaque_source_may_go_on_without_expired_records_and_says_so(topic: OrdersTopic) -> None:
    """But no redo does, after the commit: a batch that is planned again would leave out what is in no later batch."""
    source = topic.source(kind="opaque", when_expired="continue")
    topic.produce(3)
    first = topic.plan(source)
    topic.produce(5)
    topic.expire(2)
    again = topic.plan(source, None, first)
    assert {"start": 2, "end": 8, "lost": [0, 2]}.items() <= again["partitions"]["0"].items()
    redoing = coordinator_of(source, topic.settings)
    redoing.look_back(SimpleNamespace(committed=lambda: 1))
    with pytest.raises(RangeExpired, match=r"have counted in txid 1 and are gone: partition 0, offsets 0 to 2"):
        redoing.initialize_transaction(1, None, first)
    topic.expire(6)
    assert {"start": 6, "end": 8, "lost": [0, 6]}.items() <= topic.plan(source, None, again)["partitions"]["0"].items()
    topic.refused(source, again, SourceUnavailable, "The next attempt goes without them")


@pytest.mark.promise("limit:RECORDS_PER_TASK")
def test_records_that_expire_around_spark_s_read_are_missed(topic: OrdersTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our look and Spark's; and after it, because a later state of the same batch might have missed them."""
    source = topic.source()
    topic.produce(6, 6)
    first = topic.plan(source)
    attempt = Attempt("orders", 7, 1, first)
    monkeypatch.setattr(read, "RECORDS_PER_TASK", 2)
    with spark_session(topic.settings, "orders") as spark:
        emitter = emitter_of(source, spark, topic.settings)
        tasks = emitter.emit_batch(attempt, first).groupBy(F.spark_partition_id()).count().collect()
        assert [records for _, records in tasks] == [2] * 6
        topic.expire(1)
        raises(RangeExpired, lambda: emitter.verify_batch(attempt, first), "tidegate skip orders 7 ")
    with pytest.raises(RangeExpired, match="tidegate skip orders 1 "):
        topic.read(source, topic.plan(source), meddle=lambda: topic.expire(2, 1))


@pytest.mark.promise("I11")
@BOTH_KINDS
def test_a_topic_that_was_created_again_is_never_taken_for_the_old_one(topic: OrdersTopic, kind: str) -> None:
    source = topic.source(kind=kind, start="latest")
    topic.produce(2)
    first = topic.plan(source)
    topic.produce(3)
    second = topic.plan(source, first)
    topic.delete()
    topic.unplanned(source, second, error=SourceUnreadable, match=f"has no topic {topic.name}")
    topic.create(2)
    topic.produce(5, 4)
    topic.unplanned(source, second, match=f"Topic {topic.name} is another one than before.*generation=2")
    topic.refused(source, second, SourceChanged, "was deleted and created again since this batch was planned")
    source = topic.source(kind=kind, start="latest", generation=2)
    third = topic.plan(source, second)
    assert ranges(third) == {"0": (0, 5), "1": (0, 4)}
    topic.produce(1)
    assert ranges(topic.plan(source, third)) == {"0": (5, 6)}
    topic.unplanned(topic.source(kind=kind), third, match="generation 2 were read already")
    if kind == "opaque":
        given_up = {"topic": topic.name, "topic_id": second["topic_id"], "partitions": second["partitions"]}
        assert topic.plan(source, first, second)["given_up"] == given_up


def test_the_next_generation_leaves_no_planned_record_of_the_old_topic_behind(topic: OrdersTopic) -> None:
    source = topic.source(kind="opaque", max_records=4)
    topic.produce(2)
    first = topic.plan(source)
    topic.produce(6, 3)
    planned = batches(topic.settings, source, first)
    planned_once = {row[:2] for row in topic.produced[2:]}
    topic.produce(0, 9)
    planned[0] = topic.plan(source, first, planned[0])  # it reaches elsewhere now
    other = OrdersTopic(topic.settings)
    other.produce(5)
    following, read = other.source(kind="opaque", generation=2, max_records=4), [first]
    for metadata in planned:
        read.append(other.plan(following, read[-1], metadata))
    assert {metadata["topic"] for metadata in read} == {topic.name}
    assert {(int(p), o) for m in read[1:] for p, found in ranges(m).items() for o in range(*found)} >= planned_once
    assert ranges(other.plan(following, read[-1])) == {"0": (0, 4)}


def test_a_position_after_the_end_is_refused(topic: OrdersTopic) -> None:
    """Brokers that lost records would give their offsets to new ones; a position of another topic means nothing."""
    topic.produce(3)
    first = topic.plan(topic.source())
    other = OrdersTopic(topic.settings)
    other.unplanned(other.source(), first, match=f"from topic {topic.name}, not from {other.name}")
    first["partitions"]["0"]["end"] = 9
    topic.unplanned(topic.source(), first, match="ends at offset 3, but was planned up to 9")


def test_only_committed_records_of_transactions_are_read(topic: OrdersTopic) -> None:
    source = topic.source(gaps=True)
    topic.produce(2)
    topic.transaction(3, commit=False)
    topic.transaction(4, commit=True)
    producer = topic.open_transaction(1)
    topic.produce(2)
    first = topic.plan(source)
    assert ranges(first) == {"0": (0, 11)}  # a commit or an abort takes an offset too
    values = [value for _, _, value in topic.produced]
    assert [value for _, _, value in topic.read(source, first)] == [*values[:2], *["in a transaction"] * 4]
    assert topic.plan(source, first) is None
    held = source.held_back(topic.settings) or ""
    assert "partition 0 from offset 11 on" in held
    assert "partition 1" not in held
    topic.end(producer, commit=True)
    assert [value for _, _, value in topic.read(source, topic.plan(source, first))] == ["in a transaction", *values[2:]]


def test_a_compacted_topic_is_an_opaque_source_only(shops: Settings) -> None:
    topic = OrdersTopic(shops, **{"cleanup.policy": "compact"})
    topic.produce(4, key="a")
    assert ranges(topic.plan(topic.source(kind="opaque", gaps=True))) == {"0": (0, 4)}
    topic.unplanned(topic.source(gaps=True), error=SourceUnreadable, match="is compacted")
    planned = topic.plan(topic.source(kind="opaque"))
    topic.refused(topic.source(gaps=True), planned, SourceUnreadable, "is compacted", "verify_batch")


def test_offsets_without_records_are_refused_unless_declared(topic: OrdersTopic) -> None:
    """Missing records cannot be detected then. Those that Spark counts twice are a reason to try again: it repeats tasks."""
    source = topic.source()
    topic.produce(2, 4)
    topic.transaction(3, commit=True)
    with pytest.raises(SourceChanged, match=r"offsets 0 to 6: 6 records were planned, 5 delivered.* declare gaps=True"):
        topic.read(source, topic.plan(source))
    other = OrdersTopic(topic.settings)
    other.produce(4)
    first = other.plan(other.source())
    attempt = Attempt("orders", 8, 2, first)
    with spark_session(topic.settings, "orders") as spark:
        emitter = emitter_of(other.source(), spark, topic.settings)
        assert emitter.emit_batch(attempt, first).count() == 4
        emitter._delivered.get["records"].append((0, 2))
        raises(errors.RowsLost, lambda: emitter.verify_batch(attempt, first), "counts 6 records in 4 offsets")


@pytest.mark.promise("error:SOURCE_UNAVAILABLE")
def test_a_wrong_password_is_distinguished_from_brokers_that_are_away(topic: OrdersTopic, free_port: Callable[[], int]) -> None:
    with patch("tidegate.jobs.sources.kafka.topic.ANSWER_SECONDS", 2):
        topic.unplanned(topic.source(bootstrap=f"127.0.0.1:{free_port()}"), error=SourceUnavailable, match="does not answer")
    properties, password = topic.settings.kafka_properties_file.read_text(), kafka_client(topic.settings)["sasl.password"]
    (topic.settings.home / "wrong.properties").write_text(properties.replace(password, "not-the-password"))
    source = topic.source(properties_file="wrong.properties")
    assert "not-the-password" not in raises(SourceUnreadable, lambda: topic.plan(source), "refuses us")


@pytest.mark.promise("decision:0021")
def test_the_password_is_in_no_plan_metadata_or_identity(topic: OrdersTopic) -> None:
    password = kafka_client(topic.settings)["sasl.password"]
    topic.producer.produce(topic.name, b"caf\xe9", headers=[("trace", b"7")])
    topic.producer.flush(SECONDS)
    source = topic.source(headers=True)
    first = topic.plan(source)
    shown = io.StringIO()
    with spark_session(topic.settings, "orders") as spark, redirect_stdout(shown):
        emitter = emitter_of(source, spark, topic.settings)
        rows = emitter.emit_batch(Attempt("orders", 11, 1, first), first)
        rows.explain(extended=True)
        print(rows._plan.to_proto(spark.client))  # noqa: T201 - what is sent to Spark, options and all
        assert [header.asDict() for header in rows.first().headers] == [{"key": "trace", "value": b"7"}]
        assert "offset 0 (value)" in str(emitter.explain(errors.BadKey("invalid byte sequence")))
    assert "sasl.jaas.config" in shown.getvalue()
    for text in (shown.getvalue(), json.dumps(first), source.identity, repr(source)):
        assert password not in text


def test_the_password_of_a_key_is_read_where_brokers_are_asked(topic: OrdersTopic, tmp_path: Path) -> None:
    with_key = tmp_path / "with_key.properties"
    login = topic.settings.kafka_properties_file.read_text()
    emitter = emitter_of(topic.source(), None, replace(topic.settings, kafka_properties_file=with_key))
    with_key.write_text(f"{login}\nssl.key.password=sesame\n")
    assert emitter._options(topic.name, {0: (0, 1)})["kafka.ssl.key.password"] == f"${{file:{with_key}:ssl.key.password}}"
    with_key.write_text(f"{login}\nssl.key.password=back\\slash\n")
    raises(errors.SettingsInvalid, lambda: emitter._options(topic.name, {0: (0, 1)}), "Spark cannot read a password")


def test_ack_shows_positions_to_lag_tools_and_never_moves_them_back(topic: OrdersTopic) -> None:
    source = topic.source(max_records=4, group=topic.name)
    topic.produce(6, 1)
    attempts = [Attempt("orders", txid, 1, metadata) for txid, metadata in enumerate(batches(topic.settings, source), 1)]

    def shown() -> list[int]:
        with closing(Consumer({**kafka_client(topic.settings), "group.id": topic.name})) as consumer:
            known = consumer.committed([TopicPartition(topic.name, number) for number in (0, 1)], timeout=SECONDS)
        return [partition.offset for partition in known]

    source.ack(attempts[0], topic.settings)
    assert shown() == [3, 1]
    source.ack(attempts[1], topic.settings)
    source.ack(attempts[0], topic.settings)
    assert shown() == [6, 1]


# Brokers of a test's own: partitions without a leader, and logs that are cut and grow again, as after an unclean election.

INDEXES = ("*.index", "*.timeindex", "*.snapshot", "leader-epoch-checkpoint")
OF_BROKER = ("*-offset-checkpoint", ".kafka_cleanshutdown")


class Broker:
    """A broker of the test's own, without a supervisor that would start it again."""

    def __init__(self, folder: Path, free_port: Callable[[], int]) -> None:
        self._free_port = free_port
        self.kafka = kafka = EmbeddedKafka(folder, {"kafka": free_port(), "kafka_controller": free_port()})
        kafka.initialize()
        self.settings = Settings(home=folder, kafka_bootstrap=kafka.bootstrap, kafka_properties_file=kafka.client_properties)

    @contextmanager
    def running(self) -> Iterator[None]:
        component = self.kafka.component()
        broker = start(component, self.settings.home)
        try:
            assert wait_until(lambda: component.check() is None, SECONDS)
            yield
        finally:
            broker.terminate()
            broker.wait(SECONDS)

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
    def beside(self) -> Iterator[subprocess.Popen]:
        """Let a second broker, with the same properties but for its place, join the cluster; it is killed at the end."""
        (cluster,) = re.findall(r"cluster\.id=(.*)", (self.kafka.folder / "data/meta.properties").read_text())
        *java, main, file = self.kafka.component().command
        address, folder = f"CLIENT://127.0.0.1:{self._free_port()}", self.settings.home / "second"
        folder.mkdir()
        second = folder / "second.properties"
        place = f"log.dirs={folder}/data\nlisteners={address}\nadvertised.listeners={address}\n"
        second.write_text(f"{Path(file).read_text()}\nnode.id=2\nprocess.roles=broker\n{place}")  # the last of a name counts
        formatting = [*java, "kafka.tools.StorageTool", "format", "--config", second, "--cluster-id", cluster]
        subprocess.run(formatting, check=True, capture_output=True)
        log = (folder / "second.log").open("wb")
        with log, subprocess.Popen([*java, main, second], stdout=log, stderr=log) as broker:
            try:
                yield broker
            finally:
                broker.kill()


@pytest.fixture
def broker(tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> Broker:
    monkeypatch.setenv("JDK_JAVA_OPTIONS", QUICK_TO_START)
    return Broker(tmp_path, free_port)


@pytest.mark.soak
@pytest.mark.promise("error:PARTITION_UNAVAILABLE")
def test_a_partition_without_a_leader_stops_a_transactional_source_only(broker: Broker) -> None:
    with broker.running():
        topic = OrdersTopic(broker.settings)
        topic.transaction(0, commit=True)  # Kafka's own topics come into being on the broker that stays
        topic.source(group=topic.name).ack(Attempt("orders", 1, 1, topic.plan(topic.source(start="latest"))), topic.settings)
        with broker.beside() as second:
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
        topic.unplanned(transactional, first, error=errors.PartitionUnavailable, match=has_none)
        topic.refused(transactional, first, errors.PartitionUnavailable, has_none)
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
            then = "this batch was planned up to offset 13.*generation=2.*skip orders 1 "
            topic.refused(source, planned, SourceChanged, then, "verify_batch")
        assert ranges(topic.plan(topic.source(generation=2), planned))["0"][1] == 15
        older = read | {"partitions": {"0": read["partitions"]["0"] | {"leader_epoch": 1000}}}
        whole.unplanned(whole.source(), older, match=r"they are an older copy \(leader epoch 1000, now \d+\)")
        whole.produce(1)
        whole.expire(5)
        assert ranges(whole.plan(whole.source(), read)) == {"0": (13, 14)}
