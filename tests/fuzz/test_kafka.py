"""Random producers and topics: states equal the confirmed records, aggregated in Python.

Transactions that commit or abort, tombstones, empty values, bytes that are no text, headers, records quarantined and
replayed, batches processed in any order. ``SOAK`` runs many more rounds, and ``FUZZ_SEED`` one of them.
"""

import os
import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka import Producer

from tests import steps
from tests.sources.beside_kafka import server
from tests.sources.topics import SECONDS, OrdersTopic
from tidegate.jobs import Count, Kafka, Max, Min, Pipeline, State
from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.state_store import Settings, StateStore

__all__ = ["server"]  # a fixture

SEEDS = [int(seed)] if (seed := os.environ.get("FUZZ_SEED")) else range(60 if os.environ.get("SOAK") else 1)
KEYS = [None, b"", b"\x00", b"a", b"A", b"\xff\xfe", b"\\x00", b"\xed\xa0\x80", b"'\"\n,", "\U0001f30a".encode(), b"k" * 2000]
VALUES = [None, b"", b"\x00" * 3, b"null", b"\\N", b"\xc3\x28", bytes(range(256)), b"v" * 20_000, b'{"a": 1}']
HEADERS: list[list[tuple[str, bytes | None]]] = [[], [("", None)], [("a", b""), ("a", b"\xff")], [("ü\n", b"\x00;=")]]
HEADERS_TEXT = (
    "concat_ws(';', transform(headers, h -> concat(hex(encode(h.key, 'UTF-8')), '=', coalesce(hex(h.value), 'NULL'))))"
)
COLUMNS = ["key", "value", "partition AS part", "offset AS place", "timestamp AS moment", f"{HEADERS_TEXT} AS headers_text"]

Place = tuple[int, int]
Record = tuple[bytes | None, bytes | None, str, datetime]


def headers_text(headers: list[tuple[str, bytes | None]]) -> str:
    return ";".join(f"{key.encode().hex().upper()}={'NULL' if v is None else v.hex().upper()}" for key, v in headers)


class Round:
    def __init__(self, settings: Settings, seed: int) -> None:
        self.draw = random.Random(seed)
        self.topic = OrdersTopic(settings, self.draw.choice([1, 2, 5]))
        self.partitions = len(self.topic.admin.list_topics(self.topic.name, SECONDS).topics[self.topic.name].partitions)
        self.has_transactions = self.draw.random() < 0.7
        self.committed: dict[Place, Record] = {}

    def produce(self) -> None:
        for _ in range(self.draw.choice([1, 2, 4])):
            if self.has_transactions and self.draw.random() < 0.7:
                self._in_transaction()
            else:
                self.committed |= self._send(self.topic.producer)

    def _in_transaction(self) -> None:
        identity = {"transactional.id": uuid.uuid4().hex, "linger.ms": 0, "log_level": 0}
        producer = Producer({**kafka_client(self.topic.settings), **identity})
        producer.init_transactions(SECONDS)
        producer.begin_transaction()
        sent = self._send(producer)
        if self.draw.random() < 0.3:
            self.committed |= self._send(self.topic.producer)  # in between, by another producer
        if self.draw.random() < 0.4:
            producer.abort_transaction(SECONDS)
        else:
            producer.commit_transaction(SECONDS)
            self.committed |= sent

    def _send(self, producer: Producer) -> dict[Place, Record]:
        sent: dict[Place, Record] = {}

        def confirmed(headers: list[tuple[str, bytes | None]]) -> Callable[[Any, Any], None]:
            def remember(error: object, message: Any) -> None:
                assert error is None
                moment = datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC)
                sent[message.partition(), message.offset()] = (message.key(), message.value(), headers_text(headers), moment)

            return remember

        for _ in range(self.draw.choice([1, 3, 10, 40])):
            headers = self.draw.choice(HEADERS)
            producer.produce(
                self.topic.name,
                key=self.draw.choice(KEYS),
                value=self.draw.choice(VALUES),
                headers=headers,
                partition=self.draw.randrange(self.partitions),
                on_delivery=confirmed(headers),
            )
        assert producer.flush(SECONDS) == 0
        return sent

    def declare(self, register: Callable[..., None], version: int, check: dict[str, str]) -> Pipeline:
        source = Kafka(self.topic.name, kind=self.kind, gaps=self.has_transactions, headers=True, max_records=self.most)
        every = {"key": Min("key", "bytea"), "value": Min("value", "bytea"), "headers_text": Min("headers_text", "text")}
        pipeline = Pipeline(
            name="orders",
            source=source,
            version=version,
            check=check,
            on_poison="quarantine",
            transform=lambda rows: rows.selectExpr(*COLUMNS),
            states={
                "per_place": State(
                    key={"part": "integer", "place": "bigint"},
                    aggregates={**every, "moment": Min("moment", "timestamptz"), "times": Count()},
                    kind=source.kind,
                ),
                "per_key": State(
                    key={"key": "bytea"},
                    aggregates={"least": Min("value", "bytea"), "most": Max("value", "bytea"), "known": Count("value")},
                    null_keys=True,
                    kind=source.kind,
                ),
            },
        )
        register(pipeline)
        return pipeline

    @property
    def kind(self) -> Any:
        return ["transactional", "opaque"][self.partitions % 2]

    @property
    def most(self) -> int:
        return 300 if self.partitions > 1 else 1_000_000


@pytest.mark.soak
@pytest.mark.promise("name:Kafka")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_states_are_what_was_produced(
    kafka_stack: Settings, settings: Settings, register: Callable[..., None], seed: int
) -> None:
    current = Round(settings, seed)
    strict = {"not long": "coalesce(length(value), 0) < 10000", "no zeros": "NOT coalesce(value = X'000000', false)"}
    pipeline = current.declare(register, 1, strict)
    for number in range(current.draw.choice([1, 2, 3])):
        current.produce()
        process_and_commit(current, pipeline, f"run {number}")
    pipeline = current.declare(register, 2, {})
    with StateStore.connect(settings) as store:
        replayed = store.replay_quarantined(pipeline.spec, "test", "fixed")
    is_bad = {place for place, (_, value, *_) in current.committed.items() if value in (b"v" * 20_000, b"\x00" * 3)}
    assert (replayed[1] if replayed else 0) == len(is_bad), f"seed {seed}"
    current.produce()
    process_and_commit(current, pipeline, "last")

    found = {(row["part"], row["place"]): row for row in state_rows(settings, pipeline, "per_place")}
    later = {place for place, row in found.items() if row["times"] != 1}
    assert not later, f"seed {seed}: counted more than once: {later}"
    read = {p: (_bytes(r["key"]), _bytes(r["value"]), r["headers_text"], r["moment"]) for p, r in found.items()}
    missing = sorted(set(current.committed) - set(read))
    assert not missing, f"seed {seed}: missing {missing[:5]}"
    assert read == current.committed, f"seed {seed}"

    groups: dict[bytes | None, list[bytes]] = {}
    for key, value, *_ in current.committed.values():
        groups.setdefault(key, []).extend([] if value is None else [value])
    folded = {k: (min(values, default=None), max(values, default=None), len(values)) for k, values in groups.items()}
    rows = state_rows(settings, pipeline, "per_key")
    assert {_bytes(r["key"]): (_bytes(r["least"]), _bytes(r["most"]), r["known"]) for r in rows} == folded, f"seed {seed}"


def process_and_commit(current: Round, pipeline: Pipeline, run_id: str) -> None:
    settings = current.topic.settings
    while txids := steps.plan(settings, pipeline, run_id=run_id):
        order = list(txids)
        if pipeline.source.kind == "transactional":
            order = current.draw.sample([*txids, *current.draw.choices(txids, k=len(txids) // 4)], len(txids) + len(txids) // 4)
        for txid in order:
            steps.process(settings, pipeline, txid, owner="test", mode="restage" if current.draw.random() < 0.2 else "resume")
        for txid in txids:
            steps.commit(settings, pipeline, txid, owner="test")
        run_id += "+"


def state_rows(settings: Settings, pipeline: Pipeline, name: str) -> list[dict[str, Any]]:
    spec = pipeline.spec.state(name)
    assert spec is not None
    with StateStore.connect(settings) as store:
        return [dict(row) for row in store.state_rows(spec)]


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)
