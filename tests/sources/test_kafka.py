"""The Kafka source, on a real broker, reads each record exactly once or raises a named error."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from pyspark.errors import PySparkException

from tests import steps
from tests.lone_stack import kafka_stack
from tests.sources.beside_kafka import server, template
from tidegate.jobs import Count, FixedBatches, Kafka, Pipeline, State
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.jobs.sources.kafka.plan import fair_shares
from tidegate.jobs.sources.kafka.topic import Topic
from tidegate.stack.components.server_process import RunFolder, wait_until
from tidegate.stack.layout import Layout
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import (
    DeclarationChanged,
    DeclarationInvalid,
    MalformedRecord,
    PartitionUnavailable,
    RangeExpired,
    RowsLost,
    SourceChanged,
    SourceUnavailable,
    SourceUnreadable,
    TidegateError,
)
from tidegate.state_store.seal.attempts import Attempt

__all__ = ["kafka_stack", "server", "template"]  # fixtures

SECONDS = 60
KINDS = ("transactional", "opaque")
Row = tuple[int, int, str]


class TestTopic:
    """A test's own topic, with helpers to produce, plan and read."""

    __test__ = False

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
        new_topic = NewTopic(self.name, partitions, config=config, **where)
        self.admin.create_topics([new_topic])[self.name].result(SECONDS)
        assert wait_until(lambda: self.name in self.admin.list_topics(timeout=SECONDS).topics, SECONDS)

    def delete(self) -> None:
        """Delete the topic, and wait until it is gone."""
        self.admin.delete_topics([self.name])[self.name].result(SECONDS)
        assert wait_until(lambda: self.name not in self.admin.list_topics(timeout=SECONDS).topics, SECONDS)

    def add_partitions(self, total: int) -> None:
        """Increase the number of partitions."""
        self.admin.create_partitions([NewPartitions(self.name, total)])[self.name].result(SECONDS)
        known = self.admin.list_topics
        assert wait_until(lambda: len(known(self.name, SECONDS).topics[self.name].partitions) == total, SECONDS)
        self.producer = self._new_producer()  # the old producer remembers the old number

    def _new_producer(self) -> Producer:
        return Producer({**kafka_client(self.settings), "linger.ms": 0, "log_level": 0})

    def produce(self, count: int, partition: int = 0, *, timestamp: datetime | None = None, key: str | None = None) -> None:
        """Write records, and remember their offsets."""

        def remember(error: object, message: Any) -> None:
            assert error is None
            self.produced.append((message.partition(), message.offset(), message.value().decode()))

        moment = {"timestamp": int(timestamp.timestamp() * 1000)} if timestamp else {}
        for _ in range(count):
            value = f"shop {random.randrange(5)}"
            self.producer.produce(self.name, value, key, partition=partition, on_delivery=remember, **moment)
        assert self.producer.flush(SECONDS) == 0

    def expire(self, before: int, partition: int = 0) -> None:
        """Delete the partition's records before an offset, as retention does."""
        end = TopicPartition(self.name, partition, before)
        self.admin.delete_records([end])[end].result(SECONDS)

    def transaction(self, count: int, *, commit: bool) -> None:
        """Write records in a transaction, and commit or abort it."""
        with self.open_transaction(count) as producer:
            producer.commit_transaction(SECONDS) if commit else producer.abort_transaction(SECONDS)

    @contextmanager
    def open_transaction(self, count: int) -> Iterator[Producer]:
        """Write records in a transaction that stays open until the caller ends it."""
        producer = Producer({**kafka_client(self.settings), "transactional.id": uuid.uuid4().hex, "log_level": 0})
        producer.init_transactions(SECONDS)
        producer.begin_transaction()
        for _ in range(count):
            producer.produce(self.name, "in a transaction", partition=0)
        assert producer.flush(SECONDS) == 0
        yield producer

    def source(self, **changes: Any) -> Kafka:
        """Declare the topic as a source."""
        return Kafka(self.name, **changes)

    def plan(self, source: Kafka, previous: dict | None = None, current: dict | None = None, txid: int = 1) -> dict | None:
        """Plan one batch with one look at the topic, frozen as by the ledger."""
        metadata = source.coordinator(self.settings).initialize_transaction(txid, previous, current)
        return json.loads(json.dumps(metadata))

    def batches(self, source: Kafka, previous: dict | None = None) -> list[dict]:
        """Plan all available batches with one look at the topic."""
        coordinator, cut = source.coordinator(self.settings), []
        while metadata := coordinator.initialize_transaction(len(cut) + 1, previous, None):
            previous = metadata
            cut.append(metadata)
        return cut

    def read(self, source: Kafka, metadata: dict, meddle: Callable[[], None] = lambda: None) -> list[Row]:
        """Read a batch with Spark, verify it, and return its rows. It raises the pipeline's errors."""
        attempt = Attempt("orders", 1, 1, metadata)
        with spark_session(self.settings, "kafka") as spark:
            emitter = source.emitter(spark, self.settings)
            try:
                rows = emitter.emit_batch(attempt, metadata)
                meddle()
                found = [(row.partition, row.offset, bytes(row.value).decode()) for row in rows.collect()]
            except PySparkException as error:
                raise emitter.explain(error) or error from error
            emitter.verify_batch(attempt, metadata)
        return sorted(found)


@pytest.fixture
def topic(kafka_stack: Settings, settings: Settings) -> TestTopic:
    """An empty topic with two partitions."""
    return TestTopic(settings)


def ranges(metadata: dict | None) -> dict[str, tuple[int, int]]:
    """Return the ranges that a batch reads."""
    assert metadata is not None
    return {name: (found["start"], found["end"]) for name, found in metadata["partitions"].items()}


def signal_broker(stack: Settings, number: signal.Signals) -> None:
    """Suspend the broker, or kill it as a crash would; the supervisor starts it again."""
    broker = RunFolder(stack.stack_folder).read("kafka")
    assert broker is not None
    os.kill(broker.pid, number)


def await_broker(topic: TestTopic) -> None:
    """Wait until the broker answers again, and knows that it leads the partitions."""

    def answers() -> bool:
        try:
            return all(isinstance(end, int) for end in Topic(topic.name, topic.settings).offsets("latest").values())
        except SourceUnavailable:
            return False

    assert wait_until(answers, 120)


# ------------------------------------------------------------------------------------------------- exactly once


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_every_record_is_in_exactly_one_batch(topic: TestTopic, kind: str) -> None:
    """In any order of plans and producers, the batches are disjoint and complete."""
    topic.add_partitions(3)
    source = topic.source(kind=kind, max_records=13)
    cut: list[dict] = []
    for _ in range(3):
        for partition, count in enumerate(random.sample([0, 4, 11], 3)):
            topic.produce(count, partition)
        cut += topic.batches(source, cut[-1] if cut else None)

    assert sorted(row for metadata in cut for row in topic.read(source, metadata)) == sorted(topic.produced)
    assert all(sum(end - start for start, end in ranges(metadata).values()) <= 13 for metadata in cut)


@pytest.mark.parametrize("most", [1, 3, 10, 100])
def test_shares_are_fair(most: int) -> None:
    """Shares never exceed the limit, use all of it if possible, give each partition something, and are deterministic."""
    dice = random.Random(most)
    for _ in range(500):
        lags = {str(number): dice.choice([0, 0, 1, 2, 5, 50, 5000]) for number in range(dice.randrange(1, 13))}
        lagging = [name for name, lag in lags.items() if lag]
        shares = fair_shares(lags, most)

        assert sum(shares.values()) == min(most, sum(lags.values()))
        assert all(1 <= share <= lags[name] for name, share in shares.items())
        assert len(shares) == min(most, len(lagging))
        assert shares == fair_shares(dict(reversed(lags.items())), most)
    assert fair_shares({"0": 900, "1": 100}, 10) == {"0": 9, "1": 1}
    assert fair_shares({"0": 5, "1": 1, "2": 7}, 2) == {"0": 1, "2": 1}


def test_a_batch_through_the_ledger_counts_each_record_once(topic: TestTopic, register: Callable[..., None]) -> None:
    """After plan, processing and commit, with replays in between, the state equals what was produced."""
    pipeline = declare(topic, register, max_records=10)
    for run in range(2):
        topic.produce(12, 0)
        topic.produce(5, 1)
        txids = steps.plan(topic.settings, pipeline, run_id=f"run {run}")
        assert len(txids) == 2
        for txid in [*reversed(txids), txids[0]]:
            steps.process(topic.settings, pipeline, txid, owner="test", mode="restage")
        for txid in txids:
            steps.commit(topic.settings, pipeline, txid, owner="test")
            steps.commit(topic.settings, pipeline, txid, owner="test")

    assert per_shop(topic, pipeline) == Counter(value for _, _, value in topic.produced)
    assert steps.plan(topic.settings, pipeline, run_id="nothing new") == []


def test_an_opaque_source_counts_each_record_once_in_opaque_states(topic: TestTopic, register: Callable[..., None]) -> None:
    """If a batch is planned again after later ones were planned and processed, those follow."""
    pipeline = declare(topic, register, kind="opaque", max_records=10)
    topic.produce(12, 0)
    topic.produce(5, 1)
    assert steps.plan(topic.settings, pipeline, run_id="first") == [1, 2]
    steps.process(topic.settings, pipeline, 2, owner="test")
    topic.produce(20, 1)
    steps.process(topic.settings, pipeline, 1, owner="test", mode="restage")
    for txid in (1, 2):
        steps.process(topic.settings, pipeline, txid, owner="test")
        steps.commit(topic.settings, pipeline, txid, owner="test")
    while run(topic, pipeline, uuid.uuid4().hex):
        pass

    assert per_shop(topic, pipeline) == Counter(value for _, _, value in topic.produced)


def test_two_planners_at_once_plan_each_record_once(topic: TestTopic, register: Callable[..., None]) -> None:
    """The later planner looks again: txids have no gap, ranges no overlap."""
    pipeline = declare(topic, register, max_records=5)
    topic.produce(20, 0)
    topic.produce(20, 1)
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(steps.plan, topic.settings, pipeline, run_id=f"run {n}", max_batches=n + 2) for n in range(4)]
        planned = {txid for run in runs for txid in run.result()}

    with StateStore.connect(topic.settings) as store:
        opened = store.uncommitted(pipeline.name, 100)
        frozen = [store.batch_history(pipeline.name, txid).source_metadata for txid in opened]
    assert planned == set(opened) == set(range(1, len(opened) + 1))
    for partition in ("0", "1"):
        position = 0
        for metadata in frozen:
            start, end = ranges(metadata).get(partition, (position, position))
            assert start == position
            position = end


def declare(topic: TestTopic, register: Callable[..., None], *, version: int = 1, **changes: Any) -> Pipeline:
    """Declare and register a pipeline that counts records per shop."""
    source = topic.source(**changes)
    states = {"per_shop": State(key={"shop": "text"}, aggregates={"records": Count()}, kind=source.kind)}
    pipeline = Pipeline(
        name="orders",
        source=source,
        states=states,
        version=version,
        transform=lambda rows: rows.selectExpr("string(value) shop"),
    )
    register(pipeline)
    return pipeline


def run(topic: TestTopic, pipeline: Pipeline, run_id: str) -> list[int]:
    """Plan, process and commit all available batches."""
    txids = steps.plan(topic.settings, pipeline, run_id=run_id)
    for txid in txids:
        steps.process(topic.settings, pipeline, txid, owner="test")
        steps.commit(topic.settings, pipeline, txid, owner="test")
    return txids


def per_shop(topic: TestTopic, pipeline: Pipeline) -> dict[str, int]:
    """Return the state."""
    spec = pipeline.spec.state("per_shop")
    assert spec is not None
    with StateStore.connect(topic.settings) as store:
        return {row["shop"]: row["records"] for row in store.state_rows(spec)}


# ------------------------------------------------------------------------------------------------------ positions


def test_earliest_reads_what_is_left_and_spends_no_txid_on_nothing(topic: TestTopic) -> None:
    """The first batch begins with the first record that exists."""
    source = topic.source()
    assert topic.plan(source) is None
    topic.produce(5)
    topic.expire(2)

    assert ranges(topic.plan(source)) == {"0": (2, 5)}


def test_latest_keeps_its_place_before_there_is_anything_to_read(topic: TestTopic, register: Callable[..., None]) -> None:
    """The first batch is empty and commits; records produced until the next plan are not missed."""
    topic.produce(3)
    pipeline = declare(topic, register, start="latest")
    assert run(topic, pipeline, "first") == [1]
    assert per_shop(topic, pipeline) == {}
    topic.produced.clear()
    topic.produce(2, 0)
    topic.produce(4, 1)

    assert run(topic, pipeline, "second") == [2]
    assert per_shop(topic, pipeline) == Counter(value for _, _, value in topic.produced)
    assert run(topic, pipeline, "third") == []


def test_a_time_is_the_first_record_at_or_after_it(topic: TestTopic) -> None:
    """A partition whose records are all older is read from its end, not from its beginning."""
    noon = datetime(2026, 11, 1, 12, tzinfo=UTC)
    for minutes in (-2, -1, 0, 1):
        topic.produce(1, 0, timestamp=noon + timedelta(minutes=minutes))
    topic.produce(3, 1, timestamp=noon - timedelta(minutes=5))
    source = topic.source(start=noon)
    first = topic.plan(source)
    topic.produce(1, 1, timestamp=noon - timedelta(minutes=3))

    assert ranges(first) == {"0": (2, 4)}
    assert ranges(topic.plan(source, first)) == {"1": (3, 4)}
    assert ranges(topic.plan(topic.source(start=noon + timedelta(microseconds=1)))) == {"0": (3, 4)}
    assert topic.plan(topic.source(start=noon + timedelta(hours=1))) is None


@pytest.mark.parametrize("before", [timedelta(milliseconds=1), timedelta(milliseconds=2), timedelta(days=3650)])
def test_a_time_before_all_records_is_their_beginning(topic: TestTopic, before: timedelta) -> None:
    """Kafka reads -1 as the end of a partition, and refuses -3650 days."""
    topic.produce(3)
    assert ranges(topic.plan(topic.source(start=datetime(1970, 1, 1, tzinfo=UTC) - before))) == {"0": (0, 3)}


def test_a_time_that_is_reached_while_a_plan_looks_is_found(topic: TestTopic) -> None:
    """The first record at that time may come after the plan has looked at the ends: the brokers have lost nothing."""
    noon = datetime(2026, 11, 1, 12, tzinfo=UTC)
    topic.produce(3, timestamp=noon - timedelta(minutes=5))
    coordinator = topic.source(start=noon).coordinator(topic.settings)
    topic.produce(1, timestamp=noon - timedelta(minutes=1))
    topic.produce(2, timestamp=noon)

    assert coordinator.initialize_transaction(1, None, None) is None
    assert ranges(topic.plan(topic.source(start=noon))) == {"0": (4, 6)}


@pytest.mark.parametrize("start", ["earliest", "latest"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_partition_joins_with_the_next_txid_from_its_first_record(topic: TestTopic, start: str, kind: str) -> None:
    """The source's start does not matter: a new partition's records were produced after the first plan."""
    source = topic.source(start=start, kind=kind)
    topic.produce(3)
    first = topic.plan(source)
    topic.add_partitions(3)
    topic.produce(4, 2)

    again = topic.plan(source, None, first)
    assert again == first if kind == "transactional" else again["idle"] == first["idle"]
    second = topic.plan(source, first, txid=2)
    assert ranges(second) == {"2": (0, 4)}
    assert [row[:2] for row in topic.read(source, second)] == [(2, offset) for offset in range(4)]
    assert topic.plan(source, second, txid=3) is None


def test_replay_of_a_transactional_batch_is_identical(topic: TestTopic) -> None:
    """It has the same metadata and rows, even if records were produced since."""
    source = topic.source()
    topic.produce(3, 0)
    topic.produce(2, 1)
    first = topic.plan(source)
    rows = topic.read(source, first)
    topic.produce(5, 0)

    assert topic.plan(source, None, first) == first
    assert topic.read(source, first) == rows == sorted(topic.produced)[:3] + [row for row in sorted(topic.produced) if row[0]]


def test_replay_of_an_opaque_batch_begins_where_it_began(topic: TestTopic) -> None:
    """It may reach further now. So may the first batch of a source that starts at the end, which has moved."""
    topic.produce(3)
    source = topic.source(kind="opaque", start="latest")
    first = topic.plan(source)
    topic.produce(2)
    assert ranges(topic.plan(source, None, first)) == {"0": (3, 5)}
    second = topic.plan(source, first, txid=2)
    topic.produce(2)

    assert ranges(second) == {"0": (3, 5)}
    assert ranges(topic.plan(source, first, second, txid=2)) == {"0": (3, 7)}
    third = topic.plan(source, topic.plan(source, first, second), {"topic_id": second["topic_id"]}, txid=3)
    assert third["partitions"] == {}, "a batch that was planned keeps its place though nothing is left for it"
    assert third["idle"]["0"] == {"start": 3, "end": 7}


# -------------------------------------------------------------------------------------------------------- expired


@pytest.mark.promise("error:RANGE_EXPIRED", "decision:0016")
@pytest.mark.parametrize("kind", KINDS)
def test_expired_records_are_a_batch_that_fails_by_name(topic: TestTopic, kind: str) -> None:
    """They are not missed silently: the batch names the expired records; the others come after it."""
    source = topic.source(kind=kind)
    topic.produce(3)
    first = topic.plan(source)
    topic.produce(5, 0)
    topic.produce(2, 1)
    topic.expire(6)

    expired = topic.plan(source, first, txid=2)
    assert ranges(expired) == {"0": (3, 6)}, "nothing else is given up with it"
    with pytest.raises(RangeExpired, match=rf"Partition 0 of topic {topic.name}: of offsets 3 to 6, 3 have expired") as refusal:
        topic.read(source, expired)
    assert 'tidegate skip orders 1 --reason "..."' in str(refusal.value)
    assert ranges(topic.plan(source, expired, txid=3)) == {"0": (6, 8), "1": (0, 2)}


@pytest.mark.promise("decision:0016")
def test_an_expired_batch_says_how_many_records_skipping_it_gives_up(topic: TestTopic) -> None:
    """A planned range is fixed, so skipping it gives up more than the expired records: the message says how much."""
    source = topic.source()
    topic.produce(10)
    topic.produce(5, 1)
    first = topic.plan(source)
    topic.expire(4)

    with pytest.raises(RangeExpired, match="of offsets 0 to 10, 4 have expired") as refusal:
        topic.read(source, first)
    message = str(refusal.value)
    assert "The batch has 15 offsets, and 11 of them can still be read" in message
    assert "partition 0 from 4 to 10, partition 1 from 0 to 5" in message
    assert 'tidegate skip orders 1 --reason "..."' in message


def test_an_expired_batch_is_given_up_by_a_person_and_the_rest_counts(topic: TestTopic, register: Callable[..., None]) -> None:
    """It halts, is skipped with a reason, and the pipeline continues after it."""
    pipeline = declare(topic, register)
    topic.produce(3)
    assert run(topic, pipeline, "first") == [1]
    topic.produce(5)
    topic.expire(6)

    with pytest.raises(RangeExpired, match="tidegate skip orders 2 "):
        run(topic, pipeline, "second")
    with StateStore.connect(topic.settings) as store:
        assert store.batch_history("orders", 2).status.phase == "halted"
        store.skip_batch(pipeline.spec, 2, "test", "retention was too short")
    assert run(topic, pipeline, "third") == [3]
    left = [value for _, offset, value in topic.produced if offset not in range(3, 6)]
    assert per_shop(topic, pipeline) == Counter(left)


def test_an_opaque_source_may_go_on_without_expired_records_and_says_so(topic: TestTopic) -> None:
    """If declared, the next range starts with the remaining records, and the metadata names the lost ones."""
    source = topic.source(kind="opaque", when_expired="continue")
    topic.produce(3)
    first = topic.plan(source)
    topic.produce(5)
    topic.expire(6)
    second = topic.plan(source, first, txid=2)

    assert second["partitions"] == {"0": {"start": 6, "end": 8, "lost": [3, 6]}}
    assert topic.read(source, second) == topic.produced[6:]
    topic.expire(8)
    with pytest.raises(SourceUnavailable, match="The next attempt goes without them"):
        topic.read(source, second)
    again = topic.plan(source, first, second, txid=2)
    assert again["partitions"] == {"0": {"start": 8, "end": 8, "lost": [3, 8]}}
    assert topic.read(source, again) == []


def test_the_first_opaque_batch_may_expire_too(topic: TestTopic) -> None:
    """Planned again, it still begins at its planned offset, so that the lost records are named."""
    source = topic.source(kind="opaque", when_expired="continue")
    topic.produce(5)
    first = topic.plan(source)
    topic.expire(2)
    again = topic.plan(source, None, first)
    topic.expire(3)

    assert again["partitions"] == {"0": {"start": 2, "end": 5, "lost": [0, 2]}}
    assert topic.plan(source, None, again)["partitions"] == {"0": {"start": 3, "end": 5, "lost": [0, 3]}}


def test_a_redo_does_not_take_away_what_has_counted_and_expired(topic: TestTopic, register: Callable[..., None]) -> None:
    """Retention goes on after the commit: a batch that is planned again would leave out what is in no later batch."""
    pipeline = declare(topic, register, kind="opaque", when_expired="continue")
    topic.produce(4)
    assert run(topic, pipeline, "first") == [1]
    topic.produce(3)
    topic.produce(2, 1)
    assert run(topic, pipeline, "second") == [2]
    steps.redo(topic.settings, pipeline, 2, owner="test", reason="nothing has expired of it")
    counted = per_shop(topic, pipeline)
    assert counted == Counter(value for _, _, value in topic.produced)
    topic.expire(6)

    with pytest.raises(RangeExpired, match=r"have counted in txid 2 and are gone: partition 0, offsets 4 to 6"):
        steps.redo(topic.settings, pipeline, 2, owner="test", reason="too late")
    assert per_shop(topic, pipeline) == counted
    topic.produce(1)
    assert run(topic, pipeline, "third") == [3]
    assert per_shop(topic, pipeline) == Counter(value for _, _, value in topic.produced)


def test_a_new_partition_that_expired_unread_is_no_different(topic: TestTopic) -> None:
    """A new partition is read from offset 0, so its expired records are noticed."""
    source = topic.source()
    topic.produce(1)
    first = topic.plan(source)
    topic.add_partitions(3)
    topic.produce(4, 2)
    topic.expire(3, 2)

    with pytest.raises(RangeExpired, match=r"Partition 2 .* of offsets 0 to 3, 3 have expired"):
        topic.read(source, topic.plan(source, first, txid=2))


def test_records_that_expire_before_spark_reads_them_are_missed(topic: TestTopic) -> None:
    """They are noticed even if they expire between our look and Spark's."""
    source = topic.source()
    topic.produce(6)
    first = topic.plan(source)

    with pytest.raises(RangeExpired, match="tidegate skip orders 1 "):
        topic.read(source, first, meddle=lambda: topic.expire(2))


def test_records_that_expire_while_spark_reads_are_found_before_the_seal(topic: TestTopic) -> None:
    """There is a second look after the read, because a later state of the same batch might have missed them."""
    source = topic.source()
    topic.produce(6)
    first = topic.plan(source)
    attempt = Attempt("orders", 7, 1, first)
    with spark_session(topic.settings, "kafka") as spark:
        emitter = source.emitter(spark, topic.settings)
        assert emitter.emit_batch(attempt, first).count() == 6
        topic.expire(1)
        with pytest.raises(RangeExpired, match="tidegate skip orders 7 "):
            emitter.verify_batch(attempt, first)


# ------------------------------------------------------------------------------------------- not the planned records


@pytest.mark.promise("I11")
@pytest.mark.parametrize("kind", KINDS)
def test_a_topic_that_was_created_again_is_never_taken_for_the_old_one(topic: TestTopic, kind: str) -> None:
    """Its records are others, even if its offsets reach as far."""
    source = topic.source(kind=kind)
    topic.produce(3)
    first = topic.plan(source)
    topic.delete()
    with pytest.raises(SourceUnreadable, match=f"has no topic {topic.name}"):
        topic.plan(source, first, txid=2)
    topic.create(2)
    topic.produce(5)

    with pytest.raises(SourceChanged, match=f"Topic {topic.name} is another one than before"):
        topic.plan(source, first, txid=2)
    with pytest.raises(SourceChanged, match="was deleted and created again since this batch was planned"):
        topic.read(source, first)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_generation_of_a_topic_goes_on_with_the_same_state(
    topic: TestTopic, register: Callable[..., None], kind: str
) -> None:
    """With a new version, the new topic is read from its first record, regardless of the start, and the state stays."""
    topic.produce(2)
    pipeline = declare(topic, register, kind=kind, start="latest")
    assert run(topic, pipeline, "first") == [1]
    topic.produced.clear()
    topic.produce(3)
    assert run(topic, pipeline, "second") == [2]
    topic.delete()
    topic.create(2)
    topic.produce(4)
    topic.produce(5, 1)

    with pytest.raises(SourceChanged, match="generation=2"):
        run(topic, pipeline, "third")
    with pytest.raises(DeclarationChanged, match="version"):
        declare(topic, register, kind=kind, start="latest", generation=2)
    pipeline = declare(topic, register, version=2, kind=kind, start="latest", generation=2)
    assert run(topic, pipeline, "fourth") == [3]
    topic.produce(1)
    assert run(topic, pipeline, "fifth") == [4]
    assert per_shop(topic, pipeline) == Counter(value for _, _, value in topic.produced)
    newest = {"topic": topic.name, "topic_id": "any", "partitions": {}, "idle": {}, "generation": 2}
    with pytest.raises(SourceChanged, match="generation 2 were read already"):
        topic.plan(topic.source(kind=kind), newest, txid=5)


def test_the_next_generation_leaves_no_planned_record_of_the_old_topic_behind(
    topic: TestTopic, register: Callable[..., None]
) -> None:
    """A batch that was tried is planned again: in the topic it was planned from, not in the next one."""
    pipeline = declare(topic, register, kind="opaque", max_records=4)
    topic.produce(2)
    assert run(topic, pipeline, "first") == [1]
    topic.produce(6)
    topic.produce(3, 1)
    planned = steps.plan(topic.settings, pipeline, run_id="old")
    assert planned == [2, 3, 4]
    for txid in (2, 3):
        steps.process(topic.settings, pipeline, txid, owner="test")
    topic.produce(9, 1)
    steps.process(topic.settings, pipeline, 2, owner="test", mode="restage")  # it reaches elsewhere now
    other = TestTopic(topic.settings)
    other.produce(5)
    pipeline = declare(other, register, version=2, kind="opaque", generation=2, max_records=4)
    planned_once = [row for row in topic.produced if row[0] == 0 or row[1] < 3]
    for txid in planned:
        steps.process(topic.settings, pipeline, txid, owner="test")
        steps.commit(topic.settings, pipeline, txid, owner="test")

    with StateStore.connect(topic.settings) as store:
        read = [store.source_metadata("orders", txid) for txid in planned]
    assert {metadata["topic"] for metadata in read} == {topic.name}
    counted = {(int(p), o) for m in read for p, (start, end) in ranges(m).items() for o in range(start, end)}
    assert counted >= {row[:2] for row in planned_once[2:]}
    assert run(topic, pipeline, "new") == [5, 6]
    assert sum(per_shop(topic, pipeline).values()) == 2 + len(counted) + 5


def test_a_planned_batch_of_a_topic_that_is_gone_says_what_it_gives_up(topic: TestTopic) -> None:
    """By the next generation an opaque source goes on without it; the batch's metadata names what was not read."""
    topic.produce(2)
    first = topic.plan(topic.source(kind="opaque"))
    topic.produce(3)
    second = topic.plan(topic.source(kind="opaque"), first, txid=2)
    old = second["topic_id"]
    topic.delete()
    topic.create(2)
    topic.produce(4)
    again = topic.plan(topic.source(kind="opaque", generation=2), first, second, txid=2)

    assert ranges(again) == {"0": (0, 4)}
    assert again["given_up"] == {"topic": topic.name, "topic_id": old, "partitions": {"0": {"start": 2, "end": 5}}}


def test_a_topic_that_is_replaced_once_more_is_refused_in_any_generation(topic: TestTopic) -> None:
    """The first batch of a generation, planned again, has to find the topic that it was planned from."""
    topic.produce(2)
    first = topic.plan(topic.source(kind="opaque"))
    topic.delete()
    topic.create(2)
    topic.produce(5)
    source = topic.source(kind="opaque", generation=2)
    second = topic.plan(source, first, txid=2)
    topic.delete()
    topic.create(2)
    topic.produce(1)

    with pytest.raises(SourceChanged, match="is another one than before"):
        topic.plan(source, first, second, txid=2)


def test_a_generation_that_is_taken_back_before_it_is_registered_counts_nothing_twice(
    topic: TestTopic, register: Callable[..., None]
) -> None:
    """Its plan would read the topic from its first record, and the registered pipeline would count that."""
    pipeline = declare(topic, register)
    topic.produce(3)
    assert run(topic, pipeline, "first") == [1]
    again = replace(pipeline, source=topic.source(generation=2), version=2)
    with pytest.raises(DeclarationChanged, match="tidegate migrate"):
        steps.plan(topic.settings, again, run_id="not registered")

    topic.produce(1)
    assert run(topic, pipeline, "taken back") == [2]
    assert per_shop(topic, pipeline) == Counter(value for _, _, value in topic.produced)


@pytest.mark.parametrize("kind", KINDS)
def test_a_topic_that_follows_another_source_begins_by_the_next_generation(
    topic: TestTopic, register: Callable[..., None], kind: str
) -> None:
    """What is known of folders or lists is no position in a topic: the error says how to begin."""
    lists = FixedBatches([[(b"shop 1",)], [(b"shop 2",)]], {"value": "binary"}, kind=kind)
    before = replace(declare(topic, register, kind=kind), source=lists)
    register(before)
    txids = steps.plan(topic.settings, before, run_id="lists")
    steps.process(topic.settings, before, 1, owner="test")
    steps.commit(topic.settings, before, 1, owner="test")
    topic.produce(2)
    pipeline = declare(topic, register, version=2, kind=kind)
    assert txids == [1, 2]
    with pytest.raises(SourceChanged, match="planned from another source than a topic"):
        steps.process(topic.settings, pipeline, 2, owner="test")
    with StateStore.connect(topic.settings) as store:
        store.skip_batch(pipeline.spec, 2, "test", "the lists are gone")
    with pytest.raises(SourceChanged, match="declare generation=2"):
        run(topic, pipeline, "too early")
    pipeline = declare(topic, register, version=3, kind=kind, generation=2)
    assert run(topic, pipeline, "next") == [3]
    assert per_shop(topic, pipeline) == Counter(["shop 1", *(value for _, _, value in topic.produced)])


def test_another_topic_needs_another_pipeline(topic: TestTopic) -> None:
    """A position in one topic means nothing in another."""
    topic.produce(1)
    first = topic.plan(topic.source())
    other = TestTopic(topic.settings)

    with pytest.raises(SourceChanged, match=f"from topic {topic.name}, not from {other.name}"):
        other.plan(other.source(), first, txid=2)


def test_a_position_after_the_end_is_refused(topic: TestTopic) -> None:
    """Brokers that lost records would give their offsets to new ones."""
    topic.produce(3)
    source = topic.source()
    first = topic.plan(source)
    first["partitions"]["0"]["end"] = 9

    with pytest.raises(SourceChanged, match="ends at offset 3, but was planned up to 9"):
        topic.plan(source, first, txid=2)


@pytest.mark.parametrize("kind", KINDS)
def test_only_committed_records_of_transactions_are_read(topic: TestTopic, kind: str) -> None:
    """Aborted records are never read, nor are records after an open transaction, which may yet be committed."""
    source = topic.source(kind=kind, gaps=True)
    topic.produce(2)
    topic.transaction(3, commit=False)
    topic.transaction(4, commit=True)
    with topic.open_transaction(1) as producer:
        topic.produce(2)
        first = topic.plan(source)
        assert ranges(first) == {"0": (0, 11)}  # a commit or an abort takes an offset too
        assert [value for _, _, value in topic.read(source, first)] == [
            *(value for _, _, value in topic.produced[:2]),
            *["in a transaction"] * 4,
        ]
        assert topic.plan(source, first, txid=2) is None
        producer.commit_transaction(SECONDS)

    second = topic.plan(source, first, txid=2)
    assert [value for _, _, value in topic.read(source, second)] == [
        "in a transaction",
        *(value for _, _, value in topic.produced[2:]),
    ]


def test_records_behind_an_open_transaction_are_reported_as_held_back(topic: TestTopic) -> None:
    """A producer that died for good holds up its partition until someone ends its transaction: a run finds nothing new."""
    source = topic.source(gaps=True)
    topic.produce(2)
    topic.produce(1, 1)
    assert source.held_back(topic.settings) is None
    with topic.open_transaction(1) as producer:
        topic.produce(3)
        held = source.held_back(topic.settings)
        assert held is not None
        assert "partition 0 from offset 2 on" in held
        assert "partition 1" not in held
        producer.abort_transaction(SECONDS)
    assert source.held_back(topic.settings) is None


def test_a_range_without_any_record_is_an_empty_batch(topic: TestTopic, register: Callable[..., None]) -> None:
    """An aborted transaction took offsets and left no records: the batch commits without rows."""
    pipeline = declare(topic, register, gaps=True)
    topic.transaction(3, commit=False)

    assert run(topic, pipeline, "first") == [1]
    assert per_shop(topic, pipeline) == {}


def test_a_compacted_topic_is_an_opaque_source_only(settings: Settings) -> None:
    """A replay finds fewer records than the first attempt, but the range stays valid."""
    quickly = {"segment.ms": "100", "min.cleanable.dirty.ratio": "0.01", "max.compaction.lag.ms": "100"}
    topic = TestTopic(settings, **{"cleanup.policy": "compact", **quickly})
    topic.produce(4, key="a")
    topic.produce(1, key="b")
    source = topic.source(kind="opaque", gaps=True)
    first = topic.plan(source)
    assert ranges(first) == {"0": (0, 5)}

    def is_compacted() -> bool:
        topic.produce(1, key="c")  # compaction leaves the segment alone that is being written
        return [offset for _, offset, _ in topic.read(source, first)] == [3, 4]

    assert wait_until(is_compacted, SECONDS, every=1)
    with pytest.raises(SourceUnreadable, match="is compacted"):
        topic.plan(topic.source(gaps=True))


def test_offsets_without_records_are_refused_unless_declared(topic: TestTopic) -> None:
    """Missing records cannot be detected then, so the author has to declare that offsets may have gaps."""
    source = topic.source()
    topic.produce(2)
    topic.transaction(3, commit=True)

    with pytest.raises(SourceChanged, match=r"offsets 0 to 6: 6 records were planned, 5 delivered.* declare gaps=True"):
        topic.read(source, topic.plan(source))


def test_rows_that_the_transform_does_not_read_are_noticed(topic: TestTopic) -> None:
    """The count covers the records that Spark has read, not those that it could have read."""
    source = topic.source()
    topic.produce(40_000)
    first = topic.plan(source)
    attempt = Attempt("orders", 8, 1, first)
    with spark_session(topic.settings, "kafka") as spark:
        emitter = source.emitter(spark, topic.settings)
        emitter.emit_batch(attempt, first).limit(1).collect()
        with pytest.raises(DeclarationInvalid, match="of 40000 records, because the transform does not read all rows"):
            emitter.verify_batch(attempt, first)


@pytest.mark.parametrize("gaps", [False, True])
def test_records_that_spark_counts_twice_are_a_reason_to_try_again(topic: TestTopic, gaps: bool) -> None:
    """When an executor dies, Spark repeats its tasks and counts their records again: the brokers have lost nothing."""
    source = topic.source(gaps=gaps)
    topic.produce(4)
    first = topic.plan(source)
    attempt = Attempt("orders", 8, 2, first)
    with spark_session(topic.settings, "kafka") as spark:
        emitter = source.emitter(spark, topic.settings)
        assert emitter.emit_batch(attempt, first).count() == 4
        emitter._delivered.get["count_0"] += 2
        with pytest.raises(RowsLost, match="counts 6 records in 4 offsets"):
            emitter.verify_batch(attempt, first)


def test_a_transform_that_does_not_read_all_rows_is_named_in_the_error(topic: TestTopic, register: Callable[..., None]) -> None:
    """limit() ends Spark's reading: the brokers have lost nothing, and the error must not blame them."""
    source = topic.source()
    topic.produce(40_000)
    states = {"per_shop": State(key={"shop": "text"}, aggregates={"records": Count()})}
    pipeline = Pipeline(
        name="orders",
        source=source,
        states=states,
        transform=lambda rows: rows.limit(3).selectExpr("string(value) shop"),
    )
    register(pipeline)
    [txid] = steps.plan(topic.settings, pipeline, run_id="run")
    with pytest.raises(DeclarationInvalid, match=r"The transform uses limit\(\)") as refusal:
        steps.process(topic.settings, pipeline, txid, owner="test")
    assert "brokers" not in str(refusal.value)


def test_text_that_is_not_utf8_is_refused_with_its_place(topic: TestTopic, register: Callable[..., None]) -> None:
    """A cast of bytes to text accepts anything, so the error names partition and offset, for key and value."""
    topic.produce(3)
    topic.producer.produce(topic.name, b"caf\xe9", None, partition=1)
    topic.producer.produce(topic.name, "good", b"\xff", partition=1)
    topic.producer.flush(SECONDS)
    pipeline = declare(topic, register)
    [txid] = steps.plan(topic.settings, pipeline, run_id="run")
    with pytest.raises(MalformedRecord, match="not UTF-8") as refusal:
        steps.process(topic.settings, pipeline, txid, owner="test")
    assert "partition 1 offset 0 (value)" in str(refusal.value)
    assert "partition 1 offset 1 (key)" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("policy", ["block", "skip"])
def test_a_time_that_spark_cannot_hold_is_content_and_has_a_place(
    settings: Settings, register: Callable[..., None], policy: str
) -> None:
    """Nothing has expired: a producer wrote nanoseconds, which brokers before Kafka 4 accept."""
    topic = TestTopic(settings, **{"message.timestamp.after.max.ms": str(2**63 - 1)})
    pipeline = replace(declare(topic, register), on_poison=policy, tries=1)
    topic.produce(2)
    topic.producer.produce(topic.name, "shop 1", partition=1, timestamp=1_795_755_110_909_000_000)
    topic.producer.flush(SECONDS)
    [txid] = steps.plan(settings, pipeline, run_id="run")
    if policy == "block":
        with pytest.raises(MalformedRecord, match=rf"Topic {topic.name} partition 1 offset 0 has the time 1795755110909000000"):
            steps.process(settings, pipeline, txid, owner="test")
        return
    steps.process(settings, pipeline, txid, owner="test")
    assert steps.commit(settings, pipeline, txid, owner="test").skipped_reason
    topic.produce(3)
    assert run(topic, pipeline, "later") == [2]


def test_columns_are_those_that_are_documented(topic: TestTopic) -> None:
    """A batch without ranges has them too, and headers are added if they are declared."""
    topic.producer.produce(topic.name, b"v", b"k", partition=1, headers=[("trace", b"7")])
    topic.producer.flush(SECONDS)
    source = topic.source(headers=True)
    first = topic.plan(source)
    with spark_session(topic.settings, "kafka") as spark:
        emitter = source.emitter(spark, topic.settings)
        rows = emitter.emit_records(Attempt("orders", 9, 1, first), first)
        (row,) = rows.collect()
        empty = emitter.emit_batch(Attempt("orders", 10, 1, first), {**first, "partitions": {}})

        assert [bytes(row.key), bytes(row.value), row.topic, row.partition, row.offset] == [b"k", b"v", topic.name, 1, 0]
        assert [(header.key, bytes(header.value)) for header in row.headers] == [("trace", b"7")]
        assert row["_tidegate_origin"] == f"{topic.name} partition 1 offset 0"
        assert empty.count() == 0
        assert empty.schema.simpleString() == rows.select(*empty.columns).schema.simpleString()
        assert empty.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "headers"]


# ------------------------------------------------------------------------------------------------ brokers and secrets


@contextmanager
def second_broker(stack: Settings, folder: Path, port: int) -> Iterator[subprocess.Popen]:
    """Let a second broker join the stack's cluster; it is killed at the end."""
    *java, main, file = Layout.load(stack.home).kafka.component().command
    properties = dict(line.split("=", 1) for line in Path(file).read_text().splitlines())
    cluster = next(
        line for line in (stack.stack_folder / "kafka/data/meta.properties").read_text().splitlines() if "cluster.id" in line
    )
    address = f"CLIENT://127.0.0.1:{port}"
    properties |= {"node.id": "2", "process.roles": "broker", "listeners": address, "advertised.listeners": address}
    properties["log.dirs"] = str(folder / "data")
    second = folder / "second.properties"
    second.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    formatting = [*java, "kafka.tools.StorageTool", "format", "--config", second, "--cluster-id", cluster.partition("=")[2]]
    subprocess.run(formatting, check=True, capture_output=True)
    with (folder / "second.log").open("wb") as log, subprocess.Popen([*java, main, second], stdout=log, stderr=log) as broker:
        try:
            yield broker
        finally:
            broker.kill()


@pytest.mark.promise("error:PARTITION_UNAVAILABLE")
def test_a_partition_without_a_leader_stops_a_transactional_source_only(
    topic: TestTopic, kafka_stack: Settings, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """An opaque source reads the others; missing records, also of a batch planned again, come in a later batch."""
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
    assert second["idle"] == {"1": {"start": 0, "end": 2}}
    assert topic.read(opaque, second) == [row for row in topic.produced if row[:2] == (0, 2)]
    assert ranges(topic.plan(opaque, None, first)) == {"0": (0, 3)}


@pytest.mark.promise("error:SOURCE_UNAVAILABLE")
def test_a_broker_that_is_away_is_a_reason_to_try_again(topic: TestTopic, kafka_stack: Settings) -> None:
    """The broker hangs, then dies, at plan and at read. Afterwards the same batch goes through."""
    source = topic.source()
    topic.produce(5)
    first = topic.plan(source)
    for ask in (lambda: topic.plan(source, first, txid=2), lambda: topic.read(source, first)):
        signal_broker(kafka_stack, signal.SIGSTOP)
        with pytest.raises(SourceUnavailable, match="does not answer"):
            ask()
        signal_broker(kafka_stack, signal.SIGKILL)
        await_broker(topic)

    assert topic.plan(source, first, txid=2) is None
    assert topic.read(source, first) == sorted(topic.produced)


def test_a_broker_that_dies_under_spark_costs_nothing_but_time(topic: TestTopic, kafka_stack: Settings) -> None:
    """Spark gets the whole range from the restarted broker, or says that it cannot; it never gets a part."""
    source = topic.source()
    topic.produce(5)
    first = topic.plan(source)
    try:
        rows = topic.read(source, first, meddle=lambda: signal_broker(kafka_stack, signal.SIGKILL))
    except SourceUnavailable as error:
        assert "Kafka did not answer Spark" in str(error)
        await_broker(topic)
        rows = topic.read(source, first)
    assert rows == sorted(topic.produced)
    await_broker(topic)


def test_wrong_passwords_are_distinguished_from_brokers_that_are_away(topic: TestTopic, tmp_path: Path) -> None:
    """A retry does not help, and no message contains the password."""
    password = kafka_client(topic.settings)["sasl.password"]
    wrong = tmp_path / "wrong.properties"
    wrong.write_text(topic.settings.kafka_properties_file.read_text().replace(password, "not-the-password"))
    topic.produce(1)
    first = topic.plan(topic.source())
    refused = topic.source(properties_file="wrong.properties")

    with pytest.raises(SourceUnreadable, match="refuses us") as refusal:
        topic.plan(refused)
    assert "not-the-password" not in str(refusal.value)

    right = tmp_path / "right.properties"
    right.write_text(topic.settings.kafka_properties_file.read_text())
    moved = topic.source(properties_file="right.properties", bootstrap=topic.settings.kafka_bootstrap)
    assert topic.read(moved, first) == topic.produced
    with pytest.raises(SourceUnreadable, match="Kafka refuses Spark") as refusal:
        topic.read(moved, first, meddle=lambda: wrong.replace(right) and None)
    assert "not-the-password" not in str(refusal.value)
    right.write_text(topic.settings.kafka_properties_file.read_text())
    with pytest.raises(SourceUnreadable, match=f"Spark cannot read {right}"):
        topic.read(moved, first, meddle=right.unlink)


def test_a_properties_file_may_be_that_of_a_consumer(topic: TestTopic) -> None:
    """Where it begins and what it commits is decided by the ledger: Spark refuses such properties, without a message."""
    shared = topic.settings.home / "shared.properties"
    shared.write_text(
        topic.settings.kafka_properties_file.read_text() + "\nauto.offset.reset=latest\nenable.auto.commit=true\n"
    )
    topic.produce(2)
    source = topic.source(properties_file="shared.properties")
    assert topic.read(source, topic.plan(source)) == topic.produced


@pytest.mark.promise("decision:0021")
def test_the_password_is_in_no_plan_metadata_or_identity(topic: TestTopic) -> None:
    """Spark learns the password's place, not the password."""
    password = kafka_client(topic.settings)["sasl.password"]
    topic.produce(1)
    source = topic.source()
    first = topic.plan(source)
    shown = io.StringIO()
    with spark_session(topic.settings, "kafka") as spark, redirect_stdout(shown):
        rows = source.emitter(spark, topic.settings).emit_batch(Attempt("orders", 11, 1, first), first)
        rows.explain(extended=True)
        print(rows._plan.to_proto(spark.client))  # noqa: T201 - what is sent to Spark, options and all

    assert "sasl.jaas.config" in shown.getvalue()
    for text in (shown.getvalue(), json.dumps(first), source.identity, repr(source)):
        assert password not in text


@pytest.mark.parametrize("password", ["back\\slash", 'quo"te'])
def test_a_password_that_java_would_read_otherwise_is_refused(topic: TestTopic, tmp_path: Path, password: str) -> None:
    """Unlike librdkafka, Java's client does not take it literally."""
    topic.produce(1)
    first = topic.plan(topic.source())
    odd = tmp_path / "odd.properties"
    real = kafka_client(topic.settings)["sasl.password"]
    odd.write_text(topic.settings.kafka_properties_file.read_text().replace(real, password))
    source = topic.source()
    with spark_session(topic.settings, "kafka") as spark:
        emitter = source.emitter(spark, replace(topic.settings, kafka_properties_file=odd))
        with pytest.raises(TidegateError, match="Spark cannot read a password"):
            emitter._options(topic.name, {0: (0, 1)})
    assert first


def test_a_spark_without_the_connector_says_what_is_missing(topic: TestTopic, stack: Settings) -> None:
    """The message says how to install it."""
    topic.produce(1)
    without = replace(topic.settings, spark_remote=stack.spark_remote, spark_token_file=stack.spark_token_file)
    first = topic.plan(topic.source())
    with spark_session(without, "kafka") as spark:
        emitter = topic.source().emitter(spark, without)
        with pytest.raises(PySparkException) as refusal:
            emitter.emit_batch(Attempt("orders", 12, 1, first), first).collect()
        explained = emitter.explain(refusal.value)
    assert isinstance(explained, SourceUnreadable)
    assert "tidegate up --with kafka" in str(explained)


# ------------------------------------------------------------------------------------------------------ lag tools


def test_ack_shows_positions_to_lag_tools_and_never_moves_them_back(topic: TestTopic) -> None:
    """It may come late, twice and out of order; positions are never read from there."""
    source = topic.source(max_records=4)
    topic.produce(6, 0)
    topic.produce(1, 1)
    attempts = [Attempt("orders_1", txid, 1, metadata) for txid, metadata in enumerate(topic.batches(source), 1)]
    group = f"tidegate-orders_1-{topic.name}"
    source = replace(source, group=group)
    assert len(attempts) == 2

    def shown() -> dict[int, int]:
        consumer = Consumer({**kafka_client(topic.settings), "group.id": group})
        known = consumer.committed([TopicPartition(topic.name, 0), TopicPartition(topic.name, 1)], timeout=SECONDS)
        consumer.close()
        return {partition.partition: partition.offset for partition in known}

    source.ack(attempts[0], topic.settings)
    assert shown() == {0: 3, 1: 1}
    source.ack(attempts[1], topic.settings)
    source.ack(attempts[0], topic.settings)
    source.ack(attempts[1], topic.settings)
    assert shown() == {0: 6, 1: 1}
    assert topic.batches(source)[0] == attempts[0].source_metadata


# ---------------------------------------------------------------------------------------------------- declarations


def test_declaring_a_source_loads_neither_spark_nor_kafka() -> None:
    """Airflow parses declarations often."""
    loaded = "print('pyspark' in sys.modules, 'confluent_kafka' in sys.modules)"
    program = f"import sys; from tidegate.jobs import Kafka; Kafka('orders'); {loaded}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_identity_decides_which_rows_are_read() -> None:
    """The brokers' addresses, the batch size and the group for lag tools are not part of it."""
    same = Kafka("orders").identity
    for other in ({"max_records": 5}, {"bootstrap": "b:9092"}, {"properties_file": "p"}, {"group": "g"}, {"gaps": True}):
        assert Kafka("orders", **other).identity == same
    noon = datetime(2026, 11, 1, 12, tzinfo=UTC)
    for other in ({"topic": "others"}, {"start": "latest"}, {"start": noon}, {"headers": True}):
        assert Kafka(**{"topic": "orders", **other}).identity != same
    there = noon.astimezone(datetime.strptime("+0530", "%z").tzinfo)
    assert Kafka("orders", start=there).identity == Kafka("orders", start=noon).identity


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topic": "a topic"}, "is no topic"),
        ({"topic": ""}, "is no topic"),
        ({"kind": "non-transactional"}, "use one of transactional, opaque"),
        ({"start": "middle"}, "cannot start at 'middle'"),
        ({"start": datetime(2026, 11, 1)}, "Add tzinfo"),
        ({"max_records": 0}, "at least 1"),
        ({"when_expired": "ignore"}, "use one of fail, continue"),
        ({"when_expired": "continue"}, "a transactional source leaves none out"),
        ({"group": ""}, "without a name"),
        ({"generation": 0}, "at least 1"),
    ],
)
def test_a_source_that_cannot_keep_the_promise_is_refused_when_declared(arguments: dict[str, Any], message: str) -> None:
    """The constructor raises an error in words."""
    with pytest.raises(ValueError, match=message):
        Kafka(**{"topic": "orders", **arguments})
