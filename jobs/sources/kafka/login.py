"""Configures Kafka clients: one properties file, with librdkafka's names, serves both kinds of clients."""

from pathlib import Path

from tidegate.state_store.base.errors import SettingsInvalid
from tidegate.state_store.base.settings import Settings

# Properties of consumers that Spark refuses: where it reads, and what it commits, is decided here.
OF_CONSUMERS = ("auto.offset.reset", "enable.auto.commit", "interceptor.classes", "key.deserializer", "value.deserializer")


def kafka_client(settings: Settings) -> dict[str, str]:
    """Return a librdkafka client's configuration. It contains secrets: do not show or store it.

    Raises: SettingsInvalid if no broker is set, or if the properties file cannot be read.
    """
    if not settings.kafka_bootstrap:
        raise SettingsInvalid(
            "kafka_bootstrap is not set, so there is no Kafka to ask. Set it, or start one here: tidegate up --with kafka"
        )
    properties = _read_properties(settings.kafka_properties_file) if settings.kafka_properties_file else {}
    return {**properties, "bootstrap.servers": settings.kafka_bootstrap}


def kafka_java_client(settings: Settings) -> dict[str, str]:
    """Return a Java client's configuration; Spark's options are these names after ``kafka.``.

    Java has other names for librdkafka's ``sasl.username``, ``sasl.password``, ``ssl.ca.location`` and, where brokers ask for a
    certificate (mutual TLS), ``ssl.certificate.location`` and ``ssl.key.location``, which it reads from these files itself.

    Raises: SettingsInvalid, also for a private key that Java does not read.
    """
    properties = {name: value for name, value in kafka_client(settings).items() if name not in OF_CONSUMERS}
    mechanism = properties.pop("sasl.mechanisms", None) or properties.get("sasl.mechanism", "")
    user, password = properties.pop("sasl.username", None), properties.pop("sasl.password", None)
    if mechanism:
        properties["sasl.mechanism"] = mechanism
    if user and password:
        module = "scram.Scram" if mechanism.startswith("SCRAM") else "plain.Plain"
        properties["sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module}LoginModule required "
            f"username={_quoted(user)} password={_quoted(password)};"
        )
    if authority := properties.pop("ssl.ca.location", None):
        properties |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": authority}
    if properties.get("ssl.endpoint.identification.algorithm") == "none":
        properties["ssl.endpoint.identification.algorithm"] = ""
    if inline := [name for name in properties if name.endswith(".pem")]:
        raise SettingsInvalid(
            f"{inline[0]} would be shown by Spark's plans. Write it to a file, and name that: ssl.key.location."
        )
    certificate, key = properties.pop("ssl.certificate.location", None), properties.pop("ssl.key.location", None)
    if certificate and key:
        _check_key(key)
        properties |= {
            "config.providers": "directory",
            "config.providers.directory.class": "org.apache.kafka.common.config.provider.DirectoryConfigProvider",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": _content_of(certificate),
            "ssl.keystore.key": _content_of(key),
        }
    return properties


def _content_of(file: str) -> str:
    """Return what Java's Kafka client replaces by a file's content, where it runs."""
    path = Path(file).absolute()
    return f"${{directory:{path.parent}:{path.name}}}"


def _check_key(file: str) -> None:
    try:
        first, _, _ = Path(file).read_text().partition("\n")
    except (OSError, ValueError) as error:
        raise SettingsInvalid(f"ssl.key.location {file} cannot be read: {error}. Fix it or name another.") from error
    if first.strip() not in ("-----BEGIN PRIVATE KEY-----", "-----BEGIN ENCRYPTED PRIVATE KEY-----"):
        raise SettingsInvalid(
            f"ssl.key.location {file} is not a key in PKCS#8, which alone Spark's Kafka client reads. Write one: "
            f"openssl pkcs8 -topk8 -in {file} -out NEW, and name that file."
        )


def _read_properties(file: Path) -> dict[str, str]:
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise SettingsInvalid(f"kafka_properties_file {file} cannot be read: {error}. Fix it or name another.") from error
    properties = {}
    for number, line in enumerate(lines, 1):
        name, equals, value = line.partition("=")
        if line and not line.startswith("#"):
            if not equals:
                raise SettingsInvalid(f"kafka_properties_file {file}: line {number} is not name=value. Fix it.")
            properties[name.strip()] = value.strip()
    return properties


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
