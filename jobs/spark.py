"""One way to open a Spark session: Connect, or local in this process, with the settings that the promise needs."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from state_store.errors import SettingsInvalid, SparkUnavailable
from state_store.settings import Settings

REACH_TIMEOUT_SECONDS = 5
LOCAL = re.compile(r"local\[(\d+|\*)\]")
PINNED = {
    "spark.sql.session.timeZone": "UTC",  # a date of a timestamp must not depend on where the batch runs
    "spark.sql.ansi.enabled": "true",  # overflow and bad casts fail; they never become NULL or wrap
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.csv.parser.columnPruning.enabled": "false",  # a ragged record is found even if its columns are not used
}


@contextmanager
def spark_session(settings: Settings) -> Iterator[SparkSession]:
    """Open a session of its own with the pinned settings, and release it afterwards.

    Raises: SparkUnavailable if nothing listens at the address, SettingsInvalid if it is no address.
    """
    if LOCAL.fullmatch(settings.spark_remote):
        yield _configured(_local(settings), settings)
        return
    _check_reachable(settings.spark_remote)
    session = SparkSession.builder.remote(_with_token(settings)).create()
    try:
        yield _configured(session, settings)
    finally:
        session.stop()


def _local(settings: Settings) -> SparkSession:
    # One JVM per process: it stays for the next batch, and ends with the process.
    builder = SparkSession.builder.master(settings.spark_remote).appName("tidegate")
    return builder.config("spark.ui.enabled", "false").config("spark.driver.bindAddress", "127.0.0.1").getOrCreate()


def _configured(session: SparkSession, settings: Settings) -> SparkSession:
    for name, value in PINNED.items():
        session.conf.set(name, value)
    # Each shuffle partition stages over a connection of its own; adaptive execution makes fewer of small batches.
    session.conf.set("spark.sql.shuffle.partitions", str(settings.staging_connections))
    return session


def _check_reachable(remote: str) -> None:
    """Fail at once where the client would retry for minutes."""
    address = urlsplit(remote)
    if address.scheme != "sc" or not address.hostname:
        raise SettingsInvalid(f"spark_remote must be like sc://host:15002 or local[2], not {remote!r}. See: tidegate settings")
    host, port = address.hostname, address.port or 15002
    try:
        socket.create_connection((host, port), REACH_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise SparkUnavailable(f"Nothing answers at {host}:{port} for Spark: {error}. Start it: tidegate up") from error


def _with_token(settings: Settings) -> str:
    if settings.spark_token_file is None:
        return settings.spark_remote
    try:
        token = settings.spark_token_file.read_text().strip()
    except OSError as error:
        raise SettingsInvalid(f"The Spark token file {settings.spark_token_file} cannot be read: {error.strerror}.") from error
    return f"{settings.spark_remote.rstrip('/')}/;token={token}"
