"""`tidegate up --with kafka` starts a real broker, with libraries from Maven Central and a password."""

import stat
from itertools import product

import psutil
import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient

from tests.stack.conftest import Stack
from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.stack.layout import Layout
from tidegate.state_store import Settings

SECONDS = 30


@pytest.fixture
def shared(kafka_stack: Settings) -> Stack:
    return Stack(kafka_stack.home)


def test_a_topic_is_not_created_by_accident(shared: Stack) -> None:
    errors: list[object] = []
    producer = Producer(kafka_client(shared.settings) | {"message.timeout.ms": "2000"})
    producer.produce("nmubers", "1", on_delivery=lambda error, _message: errors.append(error))
    producer.flush(SECONDS)
    assert [error is None for error in errors] == [False]
    assert "nmubers" not in AdminClient(kafka_client(shared.settings)).list_topics(timeout=SECONDS).topics


@pytest.mark.soak
@pytest.mark.promise("security:another-account-of-same-machine-at-ports")
def test_a_client_without_the_password_is_refused(shared: Stack) -> None:
    right = kafka_client(shared.settings) | {"log_level": 0}
    controller = {"bootstrap.servers": f"127.0.0.1:{Layout.load(shared.home).ports['kafka_controller']}"}

    assert AdminClient(right).list_topics(timeout=SECONDS).brokers
    for change, address in product(({"security.protocol": "plaintext"}, {"sasl.password": "wrong"}), ({}, controller)):
        with pytest.raises(KafkaException):
            AdminClient(right | change | address).list_topics(timeout=3)


@pytest.mark.promise("security:other-machines", "decision:0021")
def test_the_broker_listens_on_loopback_only_and_its_secrets_are_in_private_files_only(shared: Stack) -> None:
    broker, ports = psutil.Process(shared.statuses()["kafka"].pid), Layout.load(shared.home).ports
    listening = [c.laddr for c in broker.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    own = {("127.0.0.1", ports[name]) for name in ("kafka", "kafka_controller")}
    assert {(address.ip.removeprefix("::ffff:"), address.port) for address in listening} == own
    folder, texts = shared.folder / "secrets", shared.texts()
    secrets = {name: (folder / name).read_text() for name in ("kafka_tidegate_password", "kafka_controller_password")}
    assert secrets["kafka_tidegate_password"] == kafka_client(shared.settings)["sasl.password"]
    assert stat.S_IMODE((shared.folder / "kafka").stat().st_mode) == 0o700
    assert "logs/kafka.log" in texts
    shared.check_secret(secrets, texts)
    assert not (folder / "kafka_format_arguments").exists()
