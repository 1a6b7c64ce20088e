"""`tidegate up --with kafka` starts a real broker, with libraries from Maven Central and a password."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.servers import fetch_kafka
from tests.stack.conftest import Stack
from tests.stack.test_stack import assert_ends
from tidegate import stack as embedded
from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.stack.components import java_libraries, kafka
from tidegate.stack.components.server_process import wait_until
from tidegate.stack.layout import Layout
from tidegate.state_store import Settings

SECONDS = 30


@pytest.fixture
def shared(kafka_stack: Settings) -> Stack:
    """The stack of all tests of the run, for tests that only look."""
    return Stack(kafka_stack.home)


@pytest.mark.soak
def test_kafka_is_a_component_like_the_others(new_stack: Callable[[str], Stack]) -> None:
    """Added to a running stack, in a folder with a difficult name."""
    fetch_kafka()
    running = new_stack("Zürich à la carte")
    embedded.up(running.settings, without_airflow=True)
    embedded.up(running.settings, without_airflow=True, extras=["kafka"])

    # The settings lead to it, and a plain `up` leaves it running.
    before = running.statuses()
    assert {name: status.state for name, status in before.items()} == {"postgres": "up", "spark": "up", "kafka": "up"}
    assert before["kafka"].address == running.settings.kafka_bootstrap
    done = running.tidegate("up", "--without-airflow")
    assert done.returncode == 0, done.stderr
    assert str(running.settings.kafka_properties_file) in done.stderr.replace("\n", "")
    assert running.statuses() == before

    # A stopped broker still listens; `status` says that it does not answer.
    process = psutil.Process(before["kafka"].pid)
    process.suspend()
    try:
        status = running.statuses()["kafka"]
    finally:
        process.resume()
    assert (status.state, "does not answer" in status.reason) == ("starting", True)
    assert wait_until(lambda: running.statuses()["kafka"].state == "up", SECONDS)

    # A plain `up` restarts it too, after the death of the supervisor.
    running.supervisor().kill()
    embedded.up(running.settings, without_airflow=True)
    assert running.statuses()["kafka"].state == "up"

    # After `down` no process is left, and a plain `up` starts no Kafka; a new one needs no network, and has the records.
    admin = AdminClient(kafka_client(running.settings))
    admin.create_topics([NewTopic("lasting", 1, 1)])["lasting"].result(SECONDS)
    producer = Producer(kafka_client(running.settings))
    producer.produce("lasting", "kept")
    assert producer.flush(SECONDS) == 0
    assert_ends(running)
    assert "kafka" not in running.statuses()
    assert running.settings.kafka_bootstrap is None
    done = running.tidegate("up", "--without-airflow", "--with", "kafka", JAVA_TOOL_OPTIONS=NO_NETWORK)
    assert done.returncode == 0, done.stderr
    assert "Fetching" not in done.stderr
    consumer = Consumer({**kafka_client(running.settings), "group.id": "later", "auto.offset.reset": "earliest"})
    consumer.subscribe(["lasting"])
    (found,) = consumer.consume(1, SECONDS)
    consumer.close()
    assert found.value() == b"kept"


def test_a_topic_is_not_created_by_accident(shared: Stack) -> None:
    """A misspelt topic is an error, not an empty topic."""
    refused: list[object] = []
    producer = Producer(kafka_client(shared.settings) | {"message.timeout.ms": "2000"})
    producer.produce("nmubers", "1", on_delivery=lambda error, _message: refused.append(error))
    producer.flush(SECONDS)

    assert len(refused) == 1
    assert refused[0] is not None
    assert "nmubers" not in AdminClient(kafka_client(shared.settings)).list_topics(timeout=SECONDS).topics


@pytest.mark.soak
@pytest.mark.promise("security:another-account-of-same-machine-at-ports")
def test_a_client_without_the_password_is_refused(shared: Stack) -> None:
    """A client without login or with another password is refused; the controller refuses every client."""
    right = kafka_client(shared.settings) | {"log_level": 0}
    controller = {"bootstrap.servers": f"127.0.0.1:{Layout.load(shared.home).ports['kafka_controller']}"}

    assert AdminClient(right).list_topics(timeout=SECONDS).brokers
    for change, address in product(({"security.protocol": "plaintext"}, {"sasl.password": "wrong"}), ({}, controller)):
        with pytest.raises(KafkaException):
            AdminClient(right | change | address).list_topics(timeout=3)


@pytest.mark.promise("security:other-machines")
def test_the_broker_listens_on_loopback_only(shared: Stack) -> None:
    """Other machines reach neither the broker nor its controller."""
    listening = [
        c for c in psutil.Process(shared.statuses()["kafka"].pid).net_connections("inet") if c.status == psutil.CONN_LISTEN
    ]
    ports = Layout.load(shared.home).ports

    assert {c.laddr.port for c in listening} == {ports["kafka"], ports["kafka_controller"]}
    assert {c.laddr.ip.removeprefix("::ffff:") for c in listening} == {"127.0.0.1"}


@pytest.mark.promise("decision:0021")
def test_kafkas_secrets_are_in_private_files_only(shared: Stack) -> None:
    """Passwords are in files that only their owner reads, and in no argument, environment, log or setting."""
    folder = shared.folder / "secrets"
    secrets = {name: (folder / name).read_text() for name in ("kafka_tidegate_password", "kafka_controller_password")}
    texts = {str(log): log.read_text(errors="replace") for log in (shared.folder / "logs").iterdir()}
    texts |= {name: (shared.folder / name).read_text() for name in ("stack.json", "run/stack.status")}
    for process in shared.processes():
        with suppress(psutil.Error):
            texts[f"process {process.pid}"] = "\0".join([*process.cmdline(), *process.environ().values()])

    assert min(len(secret) for secret in secrets.values()) >= 20
    assert secrets["kafka_tidegate_password"] == kafka_client(shared.settings)["sasl.password"]
    assert {file.name for file in folder.iterdir() if stat.S_IMODE(file.stat().st_mode) != 0o600} == set()
    assert stat.S_IMODE((shared.folder / "kafka").stat().st_mode) == 0o700
    assert str(shared.folder / "logs" / "kafka.log") in texts
    assert [(name, place) for name, secret in secrets.items() for place, text in texts.items() if secret in text] == []
    assert not (folder / "kafka_format_arguments").exists()


def test_a_misspelt_extra_or_package_is_refused(new_stack: Callable[[str], Stack]) -> None:
    """The refusal shows what is known, or the expected form; nothing is started."""
    stack = new_stack("misspelt")

    done = stack.tidegate("up", "--with", "kafak")
    assert (done.returncode, "'kafak' is not 'kafka'" in done.stderr) == (2, True)
    assert not stack.folder.exists()

    done = stack.tidegate("up", TIDEGATE_SPARK_PACKAGES="org.slf4j:slf4j-simple")
    assert done.returncode == 1
    assert done.stderr.startswith("tidegate: 'org.slf4j:slf4j-simple' is no Maven package: write group:artifact:version.\n")


# -- the libraries -----------------------------------------------------------------------------------------------------

# A proxy that does not exist: it stops Java, and nothing else.
NO_NETWORK = "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=9"
SMALL = "org.slf4j:slf4j-simple:1.7.36"
FETCH = (
    "import sys; from tidegate.stack.components import java_libraries; java_libraries.fetch(sys.argv[1:], print); print('done')"
)


def fetch(cache: Path, *packages: str, **environ: str) -> "subprocess.Popen[str]":
    """Start a process that fetches packages into a cache."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **environ}
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, *packages], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_without_network_one_line_says_what_to_do(new_stack: Callable[[str], Stack], tmp_path: Path) -> None:
    """The line names the package, the reason and the ways out; nothing is started, nothing unfinished is kept."""
    stack = new_stack("offline")

    done = stack.tidegate("up", "--with", "kafka", JAVA_TOOL_OPTIONS=NO_NETWORK, XDG_CACHE_HOME=str(tmp_path))

    messages = [line for line in done.stderr.splitlines() if line.startswith("tidegate:")]
    assert done.returncode == 1
    assert len(messages) == 1
    assert "spark-sql-kafka" in messages[0]
    assert "Connection refused" in messages[0]
    assert "JAVA_TOOL_OPTIONS" in messages[0]
    assert str(tmp_path) in messages[0]
    assert "Traceback" not in done.stderr
    assert [path for path in (tmp_path / "tidegate" / "jars").iterdir() if path.suffix != ".lock"] == []
    assert not any((stack.folder / "run").iterdir())


@pytest.mark.soak
def test_two_processes_that_fetch_the_same_wait_for_each_other(tmp_path: Path) -> None:
    """One of them fetches; both find all of it, and nothing else is left in the cache. Later runs need no network."""
    cache = tmp_path / "Zürich (à la carte)"
    left_over = cache / "tidegate" / "jars" / f"{java_libraries.folder([SMALL]).name}.unfinished-1"
    left_over.mkdir(parents=True)  # of a killed process
    both = [fetch(cache, SMALL) for _ in range(2)]
    answers = [process.communicate(timeout=200) for process in both]
    if refused := next((error for _, error in answers if "cannot be fetched from Maven Central" in error), None):
        pytest.skip(refused.splitlines()[-1])

    outputs = sorted(text.splitlines() for text, _ in answers)
    assert outputs == [["Fetching org.slf4j:slf4j-simple:1.7.36 from Maven Central, this once", "done"], ["done"]]
    (found,) = [path for path in left_over.parent.iterdir() if path.is_dir()]
    assert {jar.name for jar in found.iterdir()} == {"slf4j-simple-1.7.36.jar", "slf4j-api-1.7.36.jar"}
    assert fetch(cache, SMALL, JAVA_TOOL_OPTIONS=NO_NETWORK).communicate(timeout=200)[0] == "done\n"


def test_the_setting_adds_to_kafkas_packages() -> None:
    """Packages of the setting are loaded with the connector, unless the setting names a connector itself."""
    assert embedded.spark_packages(Settings(), []) == []
    assert embedded.spark_packages(Settings(spark_packages=f"{SMALL}, "), ["kafka"]) == [SMALL, *kafka.SPARK_PACKAGES]
    own = "org.apache.spark:spark-sql-kafka-0-10_2.13:9.9.9"
    assert embedded.spark_packages(Settings(spark_packages=own), ["kafka"]) == [own]
