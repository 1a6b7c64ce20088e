"""The embedded Kafka: one broker that is its own controller (KRaft), on loopback, with a password.

Clients log in by SCRAM, which never sends the password: a process that takes the port while the broker is away learns nothing.
The controller cannot use SCRAM, because it would need the stored credentials before it can read anything, so it has a password
of its own, which it sends only to itself.
"""

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.stack.components import java_libraries
from tidegate.stack.components.postgres import make_secret, write_secret
from tidegate.stack.components.server_process import Component, listens
from tidegate.stack.components.spark import java_program
from tidegate.stack.machine.private_files import private_folder
from tidegate.state_store.base.errors import PermanentError
from tidegate.state_store.base.settings import Settings

VERSION = "4.3.1"
# The logging library comes with Kafka's distribution, not with its package.
PACKAGES = (f"org.apache.kafka:kafka_2.13:{VERSION}", "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4")
# Spark's reader for Kafka: the newest complete version on Maven Central, tested with the Spark of requirements.in.
SPARK_PACKAGES = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
)
USER = "tidegate"
MECHANISM = "SCRAM-SHA-256"
HEAP_MEGABYTES = 512
CHECK_SECONDS = 3
CLUSTER_OF_ONE: dict[str, str | int] = {
    "auto.create.topics.enable": "false",  # a misspelt topic is an error, not an empty one
    "offsets.topic.replication.factor": 1,
    "offsets.topic.num.partitions": 4,  # by default 50, which makes the first consumer of a group wait
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": 4,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    "share.coordinator.state.topic.num.partitions": 1,
    "group.initial.rebalance.delay.ms": 0,  # by default a group waits 3 s for more members
}
ENVIRONMENT = {"LC_ALL": "C.UTF-8"}  # or Java cannot open files in folders with umlauts
LOGGING = """\
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yyyy-MM-dd HH:mm:ss}{UTC} %p %c{1} %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
# Refused clients and the broker's start are logged at a level that is hidden otherwise.
logger.refused.name = org.apache.kafka.common.network.Selector
logger.refused.level = info
logger.started.name = kafka.server.KafkaRaftServer
logger.started.level = info
"""


class EmbeddedKafka:
    """The files and settings of one broker."""

    def __init__(self, stack_folder: Path, ports: dict[str, int]) -> None:
        self.bootstrap = f"127.0.0.1:{ports['kafka']}"
        self.folder = stack_folder / "kafka"
        self.client_properties = stack_folder / "secrets" / "kafka.properties"
        self._ports = ports
        self._stack_folder = stack_folder
        self._server_properties = stack_folder / "secrets" / "kafka_server.properties"
        self._passwords = {name: stack_folder / "secrets" / f"kafka_{name}_password" for name in (USER, "controller")}
        self._logging = self.folder / "log4j2.properties"

    def initialize(self) -> None:
        """Write passwords and properties, and format the storage unless that was completed before."""
        java_libraries.fetch(PACKAGES)
        private_folder(self.folder)
        private_folder(self.client_properties.parent)
        for file in self._passwords.values():
            make_secret(file, lambda: secrets.token_urlsafe(24))
        client = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": MECHANISM,
            "sasl.username": USER,
            "sasl.password": self._passwords[USER].read_text(),
        }
        write_secret(self.client_properties, _lines(client))
        self._logging.write_text(LOGGING)
        data = self.folder / "data"
        if not data.exists():
            unfinished = self.folder / "data.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            self._format(unfinished)
            unfinished.rename(data)
        write_secret(self._server_properties, _lines(self._properties(data)))

    def component(self) -> Component:
        """Return how to start the broker."""
        return Component(
            "kafka",
            [*self._java(f"-Xmx{HEAP_MEGABYTES}m"), "kafka.Kafka", str(self._server_properties)],
            self._check,
            environment=ENVIRONMENT,
            folder=self.folder,
            ports=[self._ports["kafka"], self._ports["kafka_controller"]],
        )

    def _java(self, *options: str) -> list[str]:
        classpath = f"{java_libraries.folder(PACKAGES)}/*"
        return [java_program(), *options, f"-Dlog4j2.configurationFile={self._logging.as_uri()}", "-cp", classpath]

    def _format(self, data: Path) -> None:
        # The tool reads arguments from a file too: those of its command line are visible to all users.
        arguments = self._server_properties.with_name("kafka_format_arguments")
        password = self._passwords[USER].read_text()
        write_secret(arguments, f"--add-scram\n{MECHANISM}=[name={USER},password={password}]\n")
        write_secret(self._server_properties, _lines(self._properties(data)))
        command = [*self._java(), "kafka.tools.StorageTool", "format", "--config", str(self._server_properties)]
        command += ["--cluster-id", secrets.token_hex(8), f"@{arguments}"]
        try:
            done = subprocess.run(  # noqa: S603 - our own command, no shell
                command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, check=False
            )
        finally:
            arguments.unlink()
        if done.returncode:
            raise PermanentError(f"Kafka's storage cannot be made in {data}: {(done.stderr.strip() or '?').splitlines()[-1]}")

    def _properties(self, data: Path) -> dict[str, str | int]:
        """Return the broker's properties; secret, because they hold its passwords."""
        password, controller = (self._passwords[name].read_text() for name in (USER, "controller"))
        login = "org.apache.kafka.common.security"
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{self._ports['kafka_controller']}",
            "listeners": f"CLIENT://{self.bootstrap},CONTROLLER://127.0.0.1:{self._ports['kafka_controller']}",
            "advertised.listeners": f"CLIENT://{self.bootstrap}",
            "listener.security.protocol.map": "CLIENT:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT",
            "inter.broker.listener.name": "CLIENT",
            "controller.listener.names": "CONTROLLER",
            "sasl.mechanism.inter.broker.protocol": MECHANISM,
            "sasl.mechanism.controller.protocol": "PLAIN",
            "listener.name.client.sasl.enabled.mechanisms": MECHANISM,
            f"listener.name.client.{MECHANISM.lower()}.sasl.jaas.config": f"{login}.scram.ScramLoginModule required "
            f'username="{USER}" password="{password}";',
            "listener.name.controller.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.controller.plain.sasl.jaas.config": f"{login}.plain.PlainLoginModule required "
            f'username="controller" password="{controller}" user_controller="{controller}";',
            "log.dirs": str(data),
            **CLUSTER_OF_ONE,
        }

    def _check(self) -> str | None:
        if missing := listens(self._stack_folder, "kafka", self._ports["kafka"]):
            return missing
        from confluent_kafka import KafkaException  # noqa: PLC0415 - only stacks with Kafka need the client
        from confluent_kafka.admin import AdminClient  # noqa: PLC0415

        login = kafka_client(Settings(kafka_bootstrap=self.bootstrap, kafka_properties_file=self.client_properties))
        try:
            # log_level: the client would write each refused connection to standard error.
            known = AdminClient({**login, "log_level": 0}).list_topics(timeout=CHECK_SECONDS)
        except KafkaException as error:
            return f"the broker at {self.bootstrap} does not answer: {error.args[0].str()}"
        return None if known.brokers else f"the broker at {self.bootstrap} has not joined its cluster"


def _lines(properties: Mapping[str, str | int]) -> str:
    """Return a Java properties file: Latin-1 only, the rest is escaped as in JSON."""
    return "".join(f"{name}={json.dumps(str(value))[1:-1]}\n" for name, value in properties.items())
