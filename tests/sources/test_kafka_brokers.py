"""Brokers that hang, die or are few, and a Spark that cannot read topics: with a stack of the module's own, in `make soak`."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from tests.lone_stack import kafka_stack, stack
from tests.servers import Server
from tests.sources.topics import SECONDS, OrdersTopic, place, ranges, topic
from tests.store import Attempt
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.sources.binding import emitter_of
from tidegate.jobs.sources.kafka.topic import Topic
from tidegate.stack.components.server_process import RunFolder, wait_until
from tidegate.stack.layout import Layout
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import PartitionUnavailable, SettingsInvalid, SourceUnavailable, SourceUnreadable

__all__ = ["kafka_stack", "place", "stack", "topic"]  # fixtures

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def server(kafka_stack: Settings) -> Server:
    return Server(kafka_stack)


def signal_broker(stack: Settings, number: signal.Signals) -> None:
    """Suspend the broker, or kill it as a crash would; the supervisor starts it again."""
    broker = RunFolder(stack.stack_folder).read("kafka")
    assert broker is not None
    os.kill(broker.pid, number)


def await_broker(topic: OrdersTopic) -> None:
    """Wait until the broker answers again, and knows that it leads the partitions."""

    def answers() -> bool:
        try:
            return all(isinstance(end, int) for end in Topic(topic.name, topic.settings).offsets("latest").values())
        except SourceUnavailable:
            return False

    assert wait_until(answers, 120)


@contextmanager
def another_broker(stack: Settings, folder: Path, cluster: str, changed: dict[str, object]) -> Iterator[subprocess.Popen]:
    """Run a broker with the properties of the stack's, but for what is changed; it is killed at the end."""
    *java, main, file = Layout.load(stack.home).kafka.component().command
    properties = dict(line.split("=", 1) for line in Path(file).read_text().splitlines())
    properties |= {**changed, "log.dirs": str(folder / "data")}
    another = folder / "another.properties"
    another.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    formatting = [*java, "kafka.tools.StorageTool", "format", "--config", another, "--cluster-id", cluster]
    subprocess.run(formatting, check=True, capture_output=True)
    with (folder / "another.log").open("wb") as log, subprocess.Popen([*java, main, another], stdout=log, stderr=log) as broker:
        try:
            yield broker
        finally:
            broker.kill()


@contextmanager
def second_broker(stack: Settings, folder: Path, port: int) -> Iterator[subprocess.Popen]:
    """Let a second broker join the stack's cluster; it is killed at the end."""
    cluster = next(
        line for line in (stack.stack_folder / "kafka/data/meta.properties").read_text().splitlines() if "cluster.id" in line
    )
    address = f"CLIENT://127.0.0.1:{port}"
    changed: dict[str, object] = {
        "node.id": "2",
        "process.roles": "broker",
        "listeners": address,
        "advertised.listeners": address,
    }
    with another_broker(stack, folder, cluster.partition("=")[2], changed) as broker:
        yield broker


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


@pytest.mark.promise("error:SOURCE_UNAVAILABLE")
def test_a_broker_that_is_away_is_a_reason_to_try_again(topic: OrdersTopic, kafka_stack: Settings) -> None:
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


def test_a_broker_that_dies_under_spark_costs_nothing_but_time(topic: OrdersTopic, kafka_stack: Settings) -> None:
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


def test_a_spark_without_the_connector_says_what_is_missing(topic: OrdersTopic, stack: Settings) -> None:
    topic.produce(1)
    without = replace(topic.settings, spark_remote=stack.spark_remote, spark_token_file=stack.spark_token_file)
    first = topic.plan(topic.source())
    with spark_session(without, "orders") as spark:
        emitter = emitter_of(topic.source(), spark, without)
        with pytest.raises(PySparkException) as refusal:
            emitter.emit_batch(Attempt("orders", 12, 1, first), first).collect()
        explained = emitter.explain(refusal.value)
    assert isinstance(explained, SourceUnreadable)
    assert "tidegate up --with kafka" in str(explained)


def make_certificates(folder: Path, password: str) -> None:
    """Make a certificate authority, and certificates of a broker and of a client, whose key has a password."""
    (folder / "broker.extensions").write_text("subjectAltName=IP:127.0.0.1\n")
    (folder / "client.extensions").write_text("extendedKeyUsage=clientAuth\n")
    commands = ["req -x509 -newkey rsa:2048 -nodes -keyout authority.key -out authority.crt -subj /CN=authority -days 2"]
    for name in ("broker", "client"):
        commands += [
            f"req -newkey rsa:2048 -nodes -keyout {name}.plain -out {name}.request -subj /CN={name}",
            f"x509 -req -in {name}.request -CA authority.crt -CAkey authority.key -CAcreateserial -days 2"
            f" -extfile {name}.extensions -out {name}.crt",
        ]
    commands += [
        f"pkcs8 -topk8 -in client.plain -out client.newer -passout pass:{password}",
        f"pkcs8 -topk8 -v1 PBE-SHA1-3DES -in client.plain -out client.key -passout pass:{password}",
        "rsa -in client.plain -traditional -out client.traditional",
    ]
    for command in commands:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    (folder / "broker.pem").write_text((folder / "broker.plain").read_text() + (folder / "broker.crt").read_text())


def test_spark_shows_the_certificate_that_a_broker_asks_for(
    kafka_stack: Settings, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """As the plan does: mutual TLS, by librdkafka's names in the properties file; no secret is in what Spark is sent."""
    password, plain, controller, tls = "of-the-key", free_port(), free_port(), free_port()
    make_certificates(tmp_path, password)
    listeners = f"CLIENT://127.0.0.1:{plain},TLS://127.0.0.1:{tls}"
    ssl = {"truststore.type": "PEM", "truststore.location": tmp_path / "authority.crt", "client.auth": "required"}
    ssl |= {"keystore.type": "PEM", "keystore.location": tmp_path / "broker.pem"}
    names = {"ca": "authority.crt", "certificate": "client.crt", "key": "client.key"}
    lines = ["security.protocol=SSL", *(f"ssl.{name}.location={tmp_path / file}" for name, file in names.items())]
    properties = tmp_path / "tls.properties"
    properties.write_text("\n".join([*lines, f"ssl.key.password={password}"]))
    alone = {
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,TLS:SSL,CONTROLLER:PLAINTEXT",
        **{f"listener.name.tls.ssl.{name}": value for name, value in ssl.items()},
    }
    settings = replace(kafka_stack, kafka_bootstrap=f"127.0.0.1:{plain}", kafka_properties_file=None)
    with another_broker(kafka_stack, tmp_path, "dGxzLWJyb2tlci1hbG9uZQ", alone):
        topic = OrdersTopic(settings, 1)
        topic.produce(5)
        source = topic.source(bootstrap=f"127.0.0.1:{tls}", properties_file=str(properties))
        first = topic.plan(source)
        assert first is not None
        assert topic.read(source, first) == topic.produced
        sent = str(emitter_of(source, None, settings)._options(topic.name, {0: (0, 5)}))
        assert password not in sent
        assert "BEGIN" not in sent
        properties.write_text(properties.read_text().replace("client.key", "client.newer"))
        assert topic.plan(source, first, txid=2) is None
        try:
            assert topic.read(source, first) == topic.produced  # Java 21
        except SourceUnreadable as refusal:
            assert "PBES2 SecretKeyFactory not available. With a password, Java 17" in str(refusal)
        properties.write_text("\n".join(lines).replace("client.key", "client.traditional"))
        with pytest.raises(SettingsInvalid, match="openssl pkcs8 -topk8 -in"):
            topic.read(source, first)
        properties.write_text("\n".join(lines[:2]))
        with pytest.raises((SourceUnreadable, SourceUnavailable)):
            topic.plan(source)
