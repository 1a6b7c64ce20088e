"""The Kafka source, on a real broker, reads each record exactly once or raises a named error."""

import io
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import functions as F

from tests import steps
from tests.sources.beside_kafka import server
from tests.sources.feeds import KafkaFeed
from tests.sources.topics import SECONDS, OrdersTopic, declare, per_shop, place, ranges, run, topic
from tests.store import Attempt
from tidegate.jobs import Kafka
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.sources.binding import coordinator_of, emitter_of
from tidegate.jobs.sources.kafka import read
from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.jobs.sources.kafka.plan import fair_shares
from tidegate.jobs.testing import PROMISES, Bench, NotPossible
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import (
    MalformedRecord,
    RangeExpired,
    RowsLost,
    SourceChanged,
    SourceUnavailable,
    SourceUnreadable,
    TidegateError,
)

__all__ = ["place", "server", "topic"]  # fixtures

BOTH_KINDS = pytest.mark.parametrize("kind", ["transactional", "opaque"])
NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


def counted(topic: OrdersTopic) -> Counter[str]:
    return Counter(value for _, _, value in topic.produced)


# ------------------------------------------------------------------------------------------------- exactly once


def _promises() -> Iterator[Any]:
    """Yield each kind with each of its promises. Fuzzed and crashed pipelines read each record once in any run."""
    for kind in ("transactional", "opaque"):
        for promise in PROMISES[kind]:
            is_usual = kind == "transactional" and promise in ("a_replay_has_the_identical_rows", "records_are_the_rows")
            yield pytest.param(kind, promise, id=f"{kind}-{promise}", marks=() if is_usual else pytest.mark.soak)


@pytest.mark.parametrize(("kind", "promise"), list(_promises()))
def test_kafka_keeps_its_promises(settings: Settings, kind: Any, promise: str) -> None:
    """Each promise of each kind, but for the faults that a topic cannot have."""
    with spark_session(settings, "orders") as spark:
        try:
            PROMISES[kind][promise](Bench(KafkaFeed(settings, kind), spark, settings))
        except NotPossible:
            assert promise.startswith(("a_changed_row", "what_is_hidden"))


def test_every_record_is_in_exactly_one_batch(topic: OrdersTopic) -> None:
    topic.add_partitions(3)
    source = topic.source(max_records=13)
    cut: list[dict] = []
    for counts in ((4, 0, 11), (0, 11, 4), (11, 4, 0)):
        for partition, count in enumerate(counts):
            topic.produce(count, partition)
        cut += topic.batches(source, cut[-1] if cut else None)

    planned = [(int(name), offset) for batch in cut for name, found in ranges(batch).items() for offset in range(*found)]
    assert sorted(planned) == sorted(row[:2] for row in topic.produced)
    assert all(sum(end - start for start, end in ranges(metadata).values()) <= 13 for metadata in cut)


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


# ------------------------------------------------------------------------------------------------------ positions


def test_the_beginning_is_the_first_record_that_is_left_and_the_end_keeps_its_place(topic: OrdersTopic) -> None:
    earliest, latest = topic.source(), topic.source(start="latest")
    assert topic.plan(earliest) is None
    topic.produce(3)
    first = topic.plan(latest)
    assert ranges(first) == {}
    topic.produce(2, 0)
    topic.produce(4, 1)
    second = topic.plan(latest, first, txid=2)
    assert ranges(second) == {"0": (3, 5), "1": (0, 4)}
    assert topic.plan(latest, second, txid=3) is None
    topic.expire(2)
    assert ranges(topic.plan(earliest)) == {"0": (2, 5), "1": (0, 4)}


def test_a_time_is_the_first_record_at_or_after_it(topic: OrdersTopic) -> None:
    for minutes in (-2, -1, 0, 1):
        topic.produce(1, 0, timestamp=NOON + timedelta(minutes=minutes))
    topic.produce(3, 1, timestamp=NOON - timedelta(minutes=5))
    source = topic.source(start=NOON)
    first = topic.plan(source)
    topic.produce(1, 1, timestamp=NOON - timedelta(minutes=3))

    assert ranges(first) == {"0": (2, 4)}
    assert ranges(topic.plan(source, first)) == {"1": (3, 4)}
    assert ranges(topic.plan(topic.source(start=NOON + timedelta(microseconds=1)))) == {"0": (3, 4)}
    assert topic.plan(topic.source(start=NOON + timedelta(hours=1))) is None
    for before in (timedelta(milliseconds=1), timedelta(milliseconds=2), timedelta(days=3650)):  # -1 is the end for Kafka
        assert ranges(topic.plan(topic.source(start=datetime(1970, 1, 1, tzinfo=UTC) - before))) == {"0": (0, 4), "1": (0, 4)}


def test_a_time_that_is_reached_while_a_plan_looks_is_found(topic: OrdersTopic) -> None:
    topic.produce(3, timestamp=NOON - timedelta(minutes=5))
    coordinator = coordinator_of(topic.source(start=NOON), topic.settings)
    topic.produce(1, timestamp=NOON - timedelta(minutes=1))
    topic.produce(2, timestamp=NOON)

    assert coordinator.initialize_transaction(1, None, None) is None
    assert ranges(topic.plan(topic.source(start=NOON))) == {"0": (4, 6)}


@pytest.mark.soak
@pytest.mark.parametrize(("start", "kind"), [("earliest", "transactional"), ("latest", "opaque")])
def test_a_new_partition_joins_with_the_next_txid_from_its_first_record(topic: OrdersTopic, start: str, kind: str) -> None:
    source = topic.source(start=start, kind=kind)
    topic.produce(3)
    first = topic.plan(source)
    topic.add_partitions(3)
    topic.produce(4, 2)

    again = topic.plan(source, None, first)
    assert again == first if kind == "transactional" else again["idle"] == first["idle"]
    second = topic.plan(source, first, txid=2)
    assert ranges(second) == {"2": (0, 4)}
    assert topic.plan(source, second, txid=3) is None
    topic.expire(3, 2)
    late = topic.plan(source, first, txid=2)
    topic.refused(source, late, RangeExpired, r"Partition 2 .* of offsets 0 to 3, 3 have expired")


def test_replay_of_an_opaque_batch_begins_where_it_began(topic: OrdersTopic) -> None:
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
    assert {"start": 3, "end": 7, "leader_epoch": 0}.items() <= third["idle"]["0"].items()


# -------------------------------------------------------------------------------------------------------- expired


@pytest.mark.promise("error:RANGE_EXPIRED", "decision:0016")
@BOTH_KINDS
def test_expired_records_are_a_batch_that_fails_by_name(topic: OrdersTopic, kind: str) -> None:
    source = topic.source(kind=kind)
    topic.produce(3)
    first = topic.plan(source)
    topic.produce(5, 0)
    topic.produce(2, 1)
    topic.expire(6)

    expired = topic.plan(source, first, txid=2)
    assert ranges(expired) == {"0": (3, 6)}, "nothing else is given up with it"
    of = rf"Partition 0 of topic {topic.name}: of offsets 3 to 6, 3 have expired"
    assert 'tidegate skip orders 1 --reason "..."' in topic.refused(source, expired, RangeExpired, of)
    last = topic.plan(source, expired, txid=3)
    assert ranges(last) == {"0": (6, 8), "1": (0, 2)}
    topic.expire(7)
    message = topic.refused(source, last, RangeExpired, "of offsets 6 to 8, 1 have expired")
    assert "The batch has 4 offsets, and 3 of them can still be read" in message  # a person decides whether to give them up
    assert "partition 0 from 7 to 8, partition 1 from 0 to 2" in message


@pytest.mark.soak
def test_an_opaque_source_may_go_on_without_expired_records_and_says_so(topic: OrdersTopic) -> None:
    source = topic.source(kind="opaque", when_expired="continue")
    topic.produce(3)
    first = topic.plan(source)
    topic.produce(5)
    topic.expire(2)
    again = topic.plan(source, None, first)
    assert {"start": 2, "end": 8, "lost": [0, 2], "leader_epoch": 0}.items() <= again["partitions"]["0"].items()
    topic.expire(6)
    second = topic.plan(source, first, txid=2)

    assert {"start": 6, "end": 8, "lost": [0, 6], "leader_epoch": 0}.items() <= topic.plan(source, None, again)["partitions"][
        "0"
    ].items()
    assert {"start": 6, "end": 8, "lost": [3, 6], "leader_epoch": 0}.items() <= second["partitions"]["0"].items()
    assert topic.read(source, second) == topic.produced[6:]
    topic.expire(8)
    topic.refused(source, second, SourceUnavailable, "The next attempt goes without them")
    again = topic.plan(source, first, second, txid=2)
    assert {"start": 8, "end": 8, "lost": [3, 8], "leader_epoch": 0}.items() <= again["partitions"]["0"].items()
    assert topic.read(source, again) == []


@pytest.mark.soak
def test_a_redo_does_not_take_away_what_has_counted_and_expired(topic: OrdersTopic, register: Callable[..., None]) -> None:
    """Retention goes on after the commit: a batch that is planned again would leave out what is in no later batch."""
    pipeline = declare(topic, register, kind="opaque", when_expired="continue")
    topic.produce(3)
    topic.produce(2, 1)
    assert run(topic, pipeline, "first") == [1]
    steps.redo(topic.settings, pipeline, 1, owner="test", reason="nothing has expired of it")
    assert per_shop(topic, pipeline) == counted(topic)
    topic.expire(2)

    with pytest.raises(RangeExpired, match=r"have counted in txid 1 and are gone: partition 0, offsets 0 to 2"):
        steps.redo(topic.settings, pipeline, 1, owner="test", reason="too late")
    assert per_shop(topic, pipeline) == counted(topic)
    topic.produce(1)
    assert run(topic, pipeline, "second") == [2]
    assert per_shop(topic, pipeline) == counted(topic)


@pytest.mark.promise("limit:RECORDS_PER_TASK")
def test_records_that_expire_around_spark_s_read_are_missed(topic: OrdersTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our look and Spark's; and after it, because a later state of the same batch might have missed them."""
    source = topic.source()
    topic.produce(6)
    topic.produce(6, 1)
    first = topic.plan(source)
    attempt = Attempt("orders", 7, 1, first)
    monkeypatch.setattr(read, "RECORDS_PER_TASK", 2)
    with spark_session(topic.settings, "orders") as spark:
        emitter = emitter_of(source, spark, topic.settings)
        tasks = emitter.emit_batch(attempt, first).groupBy(F.spark_partition_id()).count().collect()
        assert [records for _, records in tasks] == [2] * 6
        topic.expire(1)
        with pytest.raises(RangeExpired, match="tidegate skip orders 7 "):
            emitter.verify_batch(attempt, first)
    with pytest.raises(RangeExpired, match="tidegate skip orders 1 "):
        topic.read(source, topic.plan(source), meddle=lambda: topic.expire(2, 1))


# ------------------------------------------------------------------------------------------- not the planned records


@pytest.mark.promise("I11")
@BOTH_KINDS
def test_a_topic_that_was_created_again_is_never_taken_for_the_old_one(topic: OrdersTopic, kind: str) -> None:
    """It is read from its first record as the next generation."""
    source = topic.source(kind=kind, start="latest")
    topic.produce(2)
    first = topic.plan(source)
    topic.produce(3)
    second = topic.plan(source, first, txid=2)
    topic.delete()
    with pytest.raises(SourceUnreadable, match=f"has no topic {topic.name}"):
        topic.plan(source, second, txid=3)
    topic.create(2)
    topic.produce(5)
    topic.produce(4, 1)
    with pytest.raises(SourceChanged, match=f"Topic {topic.name} is another one than before.*generation=2"):
        topic.plan(source, second, txid=3)
    topic.refused(source, second, SourceChanged, "was deleted and created again since this batch was planned")

    source = topic.source(kind=kind, start="latest", generation=2)
    third = topic.plan(source, second, txid=3)
    assert ranges(third) == {"0": (0, 5), "1": (0, 4)}
    topic.produce(1)
    assert ranges(topic.plan(source, third, txid=4)) == {"0": (5, 6)}
    with pytest.raises(SourceChanged, match="generation 2 were read already"):
        topic.plan(topic.source(kind=kind), third, txid=4)


def test_the_next_generation_leaves_no_planned_record_of_the_old_topic_behind(topic: OrdersTopic) -> None:
    source = topic.source(kind="opaque", max_records=4)
    topic.produce(2)
    first = topic.plan(source)
    topic.produce(6)
    topic.produce(3, 1)
    planned = topic.batches(source, first)
    planned_once = {row[:2] for row in topic.produced[2:]}
    topic.produce(9, 1)
    planned[0] = topic.plan(source, first, planned[0], txid=2)  # it reaches elsewhere now
    other = OrdersTopic(topic.settings)
    other.produce(5)
    following, previous, read = other.source(kind="opaque", generation=2, max_records=4), first, []
    for txid, metadata in enumerate(planned, start=2):
        previous = other.plan(following, previous, metadata, txid=txid)
        read.append(previous)

    assert {metadata["topic"] for metadata in read} == {topic.name}
    assert {(int(p), o) for m in read for p, found in ranges(m).items() for o in range(*found)} >= planned_once
    assert ranges(other.plan(following, previous, txid=5)) == {"0": (0, 4)}


def test_a_planned_batch_of_a_topic_that_is_gone_says_what_it_gives_up(topic: OrdersTopic) -> None:
    topic.produce(2)
    first = topic.plan(topic.source(kind="opaque"))
    topic.produce(3)
    second = topic.plan(topic.source(kind="opaque"), first, txid=2)
    old = second["topic_id"]
    topic.delete()
    topic.create(2)
    topic.produce(4)
    source = topic.source(kind="opaque", generation=2)
    again = topic.plan(source, first, second, txid=2)

    assert ranges(again) == {"0": (0, 4)}
    assert again["given_up"] == {"topic": topic.name, "topic_id": old, "partitions": second["partitions"]}
    assert ranges(second) == {"0": (2, 5)}
    fresh = topic.plan(source, first, txid=2)
    topic.delete()
    topic.create(2)
    topic.produce(1)
    with pytest.raises(SourceChanged, match="is another one than before"):
        topic.plan(source, first, fresh, txid=2)


def test_a_topic_that_follows_another_source_begins_by_the_next_generation(topic: OrdersTopic) -> None:
    of_lists = {"position": 2, "rows": 1, "sha256": "ab"}
    topic.produce(2)
    topic.refused(topic.source(), of_lists, SourceChanged, "planned from another source than a topic")
    with pytest.raises(SourceChanged, match="declare generation=2"):
        topic.plan(topic.source(), of_lists, txid=3)
    assert ranges(topic.plan(topic.source(generation=2), of_lists, txid=3)) == {"0": (0, 2)}


def test_a_position_after_the_end_is_refused(topic: OrdersTopic) -> None:
    """Brokers that lost records would give their offsets to new ones; a position of another topic means nothing."""
    topic.produce(3)
    first = topic.plan(topic.source())
    other = OrdersTopic(topic.settings)
    with pytest.raises(SourceChanged, match=f"from topic {topic.name}, not from {other.name}"):
        other.plan(other.source(), first, txid=2)
    first["partitions"]["0"]["end"] = 9
    with pytest.raises(SourceChanged, match="ends at offset 3, but was planned up to 9"):
        topic.plan(topic.source(), first, txid=2)


def test_only_committed_records_of_transactions_are_read(topic: OrdersTopic) -> None:
    source = topic.source(gaps=True)
    topic.produce(2)
    topic.transaction(3, commit=False)
    topic.transaction(4, commit=True)
    assert source.held_back(topic.settings) is None
    with topic.open_transaction(1) as producer:
        topic.produce(2)
        first = topic.plan(source)
        assert ranges(first) == {"0": (0, 11)}  # a commit or an abort takes an offset too
        values = [value for _, _, value in topic.produced]
        assert [value for _, _, value in topic.read(source, first)] == [*values[:2], *["in a transaction"] * 4]
        assert topic.plan(source, first, txid=2) is None
        held = source.held_back(topic.settings) or ""
        assert "partition 0 from offset 11 on" in held
        assert "partition 1" not in held
        producer.commit_transaction(SECONDS)

    assert source.held_back(topic.settings) is None
    second = topic.plan(source, first, txid=2)
    assert [value for _, _, value in topic.read(source, second)] == ["in a transaction", *values[2:]]


def test_a_compacted_topic_is_an_opaque_source_only(place: Settings) -> None:
    topic = OrdersTopic(place, **{"cleanup.policy": "compact"})
    topic.produce(4, key="a")
    assert ranges(topic.plan(topic.source(kind="opaque", gaps=True))) == {"0": (0, 4)}
    with pytest.raises(SourceUnreadable, match="is compacted"):
        topic.plan(topic.source(gaps=True))
    planned = topic.plan(topic.source(kind="opaque"))
    with pytest.raises(SourceUnreadable, match="is compacted"):
        emitter_of(topic.source(gaps=True), None, topic.settings).verify_batch(Attempt("orders", 1, 1, planned), planned)  # type: ignore[arg-type]


def test_offsets_without_records_are_refused_unless_declared(topic: OrdersTopic) -> None:
    """Missing records cannot be detected then. Those that Spark counts twice are a reason to try again: it repeats tasks."""
    source = topic.source()
    topic.produce(2)
    topic.produce(4, 1)
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
        with pytest.raises(RowsLost, match="counts 6 records in 4 offsets"):
            emitter.verify_batch(attempt, first)
        beyond = {**first, "partitions": {"0": {**first["partitions"]["0"], "start": 1}}}
        assert emitter.emit_batch(attempt, beyond).count() == 3
        emitter._delivered.get["outside"] += 1
        with pytest.raises(SourceChanged, match="delivered 1 records that were not planned"):
            emitter.verify_batch(attempt, beyond)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("records", "places"),
    [
        (  # a cast of bytes to text accepts anything
            [{"value": b"caf\xe9"}, {"value": "good", "key": b"\xff"}],
            ["partition 1 offset 0 (value)", "partition 1 offset 1 (key)", "not UTF-8"],
        ),
        (  # nothing has expired: a producer wrote nanoseconds, which brokers before Kafka 4 accept
            [{"value": "shop 1", "timestamp": 1_795_755_110_909_000_000}],
            ["partition 1 offset 0 has the time 1795755110909000000"],
        ),
    ],
    ids=["not UTF-8", "nanoseconds"],
)
def test_records_that_cannot_be_read_are_refused_with_their_places(
    settings: Settings, register: Callable[..., None], records: list[dict[str, Any]], places: list[str]
) -> None:
    topic = OrdersTopic(settings, **{"message.timestamp.after.max.ms": str(2**63 - 1)})
    topic.produce(3)
    for record in records:
        topic.producer.produce(topic.name, partition=1, **record)
    topic.producer.flush(SECONDS)
    with pytest.raises(MalformedRecord, match=topic.name) as refusal:
        run(topic, declare(topic, register), "run")
    assert [place for place in places if place not in str(refusal.value)] == []


def test_columns_are_those_that_are_documented(topic: OrdersTopic) -> None:
    topic.producer.produce(topic.name, b"v", b"k", partition=1, headers=[("trace", b"7")])
    topic.producer.flush(SECONDS)
    source = topic.source(headers=True)
    first = topic.plan(source)
    with spark_session(topic.settings, "orders") as spark:
        emitter = emitter_of(source, spark, topic.settings)
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


@pytest.mark.promise("error:SOURCE_UNAVAILABLE")
def test_brokers_that_are_away_are_a_reason_to_try_again(
    topic: OrdersTopic, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.jobs.sources.kafka.topic.ANSWER_SECONDS", 2)
    with pytest.raises(SourceUnavailable, match="does not answer"):
        topic.plan(topic.source(bootstrap=f"127.0.0.1:{free_port()}"))


@pytest.mark.soak
def test_wrong_passwords_are_distinguished_from_brokers_that_are_away(topic: OrdersTopic, tmp_path: Path) -> None:
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
    shared = "\nauto.offset.reset=latest\nenable.auto.commit=true\n"  # as of a consumer: Spark refuses these, without a message
    right.write_text(topic.settings.kafka_properties_file.read_text() + shared)
    moved = topic.source(properties_file="right.properties", bootstrap=topic.settings.kafka_bootstrap)
    assert topic.read(moved, first) == topic.produced
    with pytest.raises(SourceUnreadable, match="Kafka refuses Spark") as refusal:
        topic.read(moved, first, meddle=lambda: wrong.replace(right) and None)
    assert "not-the-password" not in str(refusal.value)
    right.write_text(topic.settings.kafka_properties_file.read_text())
    with pytest.raises(SourceUnreadable, match=f"Spark cannot read {right}"):
        topic.read(moved, first, meddle=right.unlink)


@pytest.mark.promise("decision:0021")
def test_the_password_is_in_no_plan_metadata_or_identity(topic: OrdersTopic) -> None:
    password = kafka_client(topic.settings)["sasl.password"]
    topic.produce(1)
    source = topic.source()
    first = topic.plan(source)
    shown = io.StringIO()
    with spark_session(topic.settings, "orders") as spark, redirect_stdout(shown):
        rows = emitter_of(source, spark, topic.settings).emit_batch(Attempt("orders", 11, 1, first), first)
        rows.explain(extended=True)
        print(rows._plan.to_proto(spark.client))  # noqa: T201 - what is sent to Spark, options and all

    assert "sasl.jaas.config" in shown.getvalue()
    for text in (shown.getvalue(), json.dumps(first), source.identity, repr(source)):
        assert password not in text


@pytest.mark.parametrize("password", ["back\\slash", 'quo"te'])
def test_a_password_that_java_would_read_otherwise_is_refused(topic: OrdersTopic, tmp_path: Path, password: str) -> None:
    odd = tmp_path / "odd.properties"
    real = kafka_client(topic.settings)["sasl.password"]
    odd.write_text(topic.settings.kafka_properties_file.read_text().replace(real, password))
    emitter = emitter_of(topic.source(), None, replace(topic.settings, kafka_properties_file=odd))
    with pytest.raises(TidegateError, match="Spark cannot read a password"):
        emitter._options(topic.name, {0: (0, 1)})


def test_the_password_of_a_key_is_read_where_brokers_are_asked(topic: OrdersTopic, tmp_path: Path) -> None:
    with_key = tmp_path / "with_key.properties"
    with_key.write_text(f"{topic.settings.kafka_properties_file.read_text()}\nssl.key.password=sesame\n")
    emitter = emitter_of(topic.source(), None, replace(topic.settings, kafka_properties_file=with_key))
    options = emitter._options(topic.name, {0: (0, 1)})
    assert options["kafka.ssl.key.password"] == f"${{file:{with_key}:ssl.key.password}}"


# ------------------------------------------------------------------------------------------------------ lag tools


def test_ack_shows_positions_to_lag_tools_and_never_moves_them_back(topic: OrdersTopic) -> None:
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


def test_identity_decides_which_rows_are_read() -> None:
    same = Kafka("orders").identity
    for other in ({"max_records": 5}, {"bootstrap": "b:9092"}, {"properties_file": "p"}, {"group": "g"}, {"gaps": True}):
        assert Kafka("orders", **other).identity == same
    for other in ({"topic": "others"}, {"start": "latest"}, {"start": NOON}, {"headers": True}):
        assert Kafka(**{"topic": "orders", **other}).identity != same
    there = NOON.astimezone(datetime.strptime("+0530", "%z").tzinfo)
    assert Kafka("orders", start=there).identity == Kafka("orders", start=NOON).identity


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
    with pytest.raises(ValueError, match=message):
        Kafka(**{"topic": "orders", **arguments})
