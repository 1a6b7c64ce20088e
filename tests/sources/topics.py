"""A topic of a test's own on a real broker, planned and read without a ledger."""

import json
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from pyspark.errors import PySparkException

from tests.servers import Server
from tests.sources.in_process import plan, raises
from tests.store import Attempt
from tidegate.jobs import Kafka
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.sources.binding import emitter_of
from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SourceChanged, TidegateError

SECONDS = 60
Row = tuple[int, int, str]


class OrdersTopic:
    """A topic, with helpers to produce, plan and read."""

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
        self.admin.create_topics([NewTopic(self.name, partitions, config=config, **where)])[self.name].result(SECONDS)
        assert wait_until(lambda: self.name in self.admin.list_topics(timeout=SECONDS).topics, SECONDS)

    def delete(self) -> None:
        """Delete the topic, and wait until it is gone."""
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
        """Produce so many records to the first partitions."""

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
        return Kafka(self.name, **changes)

    def plan(self, source: Kafka, previous: Any = None, current: Any = None) -> Any:
        """Plan one batch with one look at the topic, frozen as by the ledger."""
        return json.loads(json.dumps(plan(self.settings, source, previous, current)))

    def unplanned(self, source: Kafka, *plans: Any, match: str, error: type[TidegateError] = SourceChanged) -> None:
        """Check that no batch is planned after these batches, and why."""
        raises(error, lambda: self.plan(source, *plans), match)

    def refused(self, source: Kafka, metadata: dict, error: type[TidegateError], match: str) -> str:
        """Check that a batch is refused before Spark reads anything; return the error's line."""
        reader, attempt = emitter_of(source, None, self.settings), Attempt("orders", 1, 1, metadata)
        return raises(error, lambda: reader.emit_batch(attempt, metadata), match)

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
    """The Postgres server of the run, with settings that lead to its broker: for modules that import this fixture."""
    return Server(kafka_stack)


@pytest.fixture(scope="module")
def place(server: Server) -> Iterator[Settings]:
    name = server.create_database()
    yield replace(server.settings, pg_database=name)
    server.drop_database(name)


@pytest.fixture
def topic(place: Settings, tmp_path: Path) -> OrdersTopic:
    """An empty topic with two partitions."""
    return OrdersTopic(replace(place, home=tmp_path))
