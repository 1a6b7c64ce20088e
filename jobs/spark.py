"""One way to open a Spark session: Connect, or local in this process, with the settings that the promise needs."""

import logging
import math
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import grpc
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.connect.client.retries import DefaultPolicy
from pyspark.sql.connect.session import SparkSession as ConnectSession

from state_store.attempts import Attempt
from state_store.errors import AttemptTimedOut, SettingsInvalid, SparkFailed, SparkUnavailable, TidegateError
from state_store.settings import Settings

logger = logging.getLogger(__name__)

REACH_TIMEOUT_SECONDS = 5
# How soon an attempt notices that it is fenced; one small query each.
SECONDS_BETWEEN_LOOKS = 5.0
# Some 45 s in all: a server that restarts is waited for; for longer absences the whole batch is tried again.
SERVER_RETRIES, MAX_BACKOFF_MILLISECONDS = 8, 10_000
MAX_CLOSED_SESSIONS = 1000  # as many as a server remembers
LOCAL = re.compile(r"local\[(\d+|\*)\]")
PINNED = {
    "spark.sql.session.timeZone": "UTC",  # a date of a timestamp must not depend on where the batch runs
    "spark.sql.ansi.enabled": "true",  # overflow and bad casts fail; they never become NULL or wrap
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    # otherwise the count of source rows is lost when none of them reaches a state
    "spark.sql.adaptive.optimizer.excludedRules": "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation",
    "spark.sql.csv.parser.columnPruning.enabled": "false",  # a ragged record is found even if its columns are not used
}
QUICK = {
    # whether the one task that groups a whole batch also keeps groups where compiled code finds them, and how many (2^n)
    "spark.sql.codegen.aggregate.map.twolevel.partialOnly": "false",
    "spark.sql.codegen.aggregate.fastHashMap.capacityBit": "20",  # by default 65,536
}
# Spark works out how many bytes an Arrow batch has before each row that it adds for Python, unless there is no limit: then only
# the number of rows is limited, to 10,000. The limit is Spark's own.
BYTES_PER_ARROW_BATCH = "spark.sql.execution.arrow.maxBytesPerBatch"
LIMITED, UNLIMITED = str(64 * 1024**2) + "b", str(2**31 - 1)
_applications: WeakKeyDictionary[SparkSession, str] = WeakKeyDictionary()


@contextmanager
def spark_session(settings: Settings, pipeline: str, *, rows_are_short: bool = False) -> Iterator[SparkSession]:
    """Join the pipeline's session, with the pinned settings; leave it on the server for the next batch.

    `rows_are_short` promises that no row is long which Python gets to see, so that only their number has to be limited.

    Spark starts Python workers per session and keeps them until the server ends: a session per batch costs 2 s of start-up
    each (0.2 s in a used one) and leaks a process. So all batches of a pipeline share one session.

    Raises: SparkUnavailable if nothing listens at the address, SettingsInvalid if it is no address.
    """
    if LOCAL.fullmatch(settings.spark_remote):
        yield _configured(_local(settings), settings, rows_are_short)
        return
    _check_reachable(settings.spark_remote)
    session = _join(settings, pipeline, rows_are_short)
    try:
        yield session
    finally:
        session.release_session_on_close = False
        session.stop()


def application_of(session: SparkSession) -> str:
    """Return the id of the Spark application that a session of `spark_session` computes in, without asking for it again."""
    return _applications[session]


def expect_brief(session: SparkSession) -> None:
    """Make the session's further queries ones that cannot be taken up again after a broken connection.

    By default the server keeps each part of an answer until it is told, by a call of its own, that this part has arrived:
    eight calls for a batch of 100 rows. A batch of a second is sooner tried again.
    """
    if isinstance(session, ConnectSession):
        session.client.disable_reattachable_execute()


def failure_of(error: PySparkException | grpc.RpcError, **identity: Any) -> SparkFailed | SparkUnavailable:
    """Return what Spark's own error means to whoever may try again: that it gave up, or that its server is away."""
    family = SparkUnavailable if isinstance(error, grpc.RpcError) else SparkFailed
    return family(f"Spark failed: {first_line(error)}", **identity)


def first_line(error: Exception) -> str:
    """Return what an error says, without the plans and traces below it."""
    return " ".join(str(error).strip().splitlines()[:1])


def tag_of(pipeline: str, txid: int, number: int) -> str:
    """Return the tag of an attempt's Spark operations."""
    return f"tidegate-{pipeline}-{txid}-{number}"


@contextmanager
def interruptible(
    spark: SparkSession, attempt: Attempt, timeout_seconds: int | None, is_fenced: Callable[[], bool]
) -> Iterator[str]:
    """Tag what this thread runs, and interrupt it when it is fenced or takes longer than the timeout. Yields the tag.

    The attempts that this one has fenced are interrupted first: nothing of them counts any more. That can miss one that is
    about to start an operation, so each attempt also looks after itself, every few seconds.

    Raises: AttemptTimedOut.
    """
    for number in attempt.fenced:
        spark.interruptTag(tag_of(attempt.pipeline, attempt.txid, number))
    tag, has_ended, is_overdue = tag_of(attempt.pipeline, attempt.txid, attempt.number), Event(), Event()
    deadline = time.monotonic() + timeout_seconds if timeout_seconds else math.inf

    def watch() -> None:
        while not has_ended.wait(max(0.1, min(SECONDS_BETWEEN_LOOKS, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                is_overdue.set()
            try:
                if is_overdue.is_set() or is_fenced():
                    spark.interruptTag(tag)
            except (TidegateError, PySparkException, grpc.RpcError) as error:
                logger.info("%s: whether it is fenced cannot be found out now: %s", attempt, error)

    watcher = Thread(target=watch, name=f"watch {attempt}", daemon=True)
    spark.addTag(tag)
    watcher.start()
    try:
        yield tag
    except Exception as error:
        if not is_overdue.is_set():
            raise
        raise AttemptTimedOut(
            f"{attempt} took longer than its message timeout of {timeout_seconds} s, and was interrupted. It is tried again.",
            pipeline=attempt.pipeline,
            txid=attempt.txid,
            attempt=attempt.number,
        ) from error
    finally:
        has_ended.set()
        watcher.join()
        spark.removeTag(tag)


def _join(settings: Settings, name: str, rows_are_short: bool) -> SparkSession:
    """Return the session of this name, created by the first who asks; the next of its line if the server has closed it."""
    for generation in range(MAX_CLOSED_SESSIONS):
        session_id = uuid.uuid5(uuid.NAMESPACE_URL, f"tidegate:{name}/{generation}")
        address = f"{settings.spark_remote.rstrip('/')}/;user_id=tidegate;session_id={session_id}{_token(settings)}"
        session = SparkSession.builder.remote(address).create()
        session.client.set_retry_policies([DefaultPolicy(max_retries=SERVER_RETRIES, max_backoff=MAX_BACKOFF_MILLISECONDS)])
        try:
            return _configured(session, settings, rows_are_short)
        except PySparkException as error:
            if "INVALID_HANDLE" not in str(error):
                raise
            session.release_session_on_close = False
            session.stop()
    raise SparkUnavailable(f"The Spark server closed {MAX_CLOSED_SESSIONS} sessions of {name}. Restart it.")


def _local(settings: Settings) -> SparkSession:
    # One JVM per process: it stays for the next batch, and ends with the process.
    builder = SparkSession.builder.master(settings.spark_remote).appName("tidegate")
    return builder.config("spark.ui.enabled", "false").config("spark.driver.bindAddress", "127.0.0.1").getOrCreate()


def _configured(session: SparkSession, settings: Settings, rows_are_short: bool) -> SparkSession:
    wanted = {
        **PINNED,
        **QUICK,
        BYTES_PER_ARROW_BATCH: UNLIMITED if rows_are_short else LIMITED,
        # Each shuffle partition stages over a connection of its own; adaptive execution makes fewer of small batches.
        "spark.sql.shuffle.partitions": str(settings.staging_connections),
    }
    found = session.conf.getAll  # one round trip; a session that is joined has been configured by whoever came first
    for name, value in wanted.items():
        if found.get(name) != value:
            session.conf.set(name, value)
    _applications[session] = found.get("spark.app.id", "unknown")
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


def _token(settings: Settings) -> str:
    if settings.spark_token_file is None:
        return ""
    try:
        token = settings.spark_token_file.read_text().strip()
    except OSError as error:
        raise SettingsInvalid(f"The Spark token file {settings.spark_token_file} cannot be read: {error.strerror}.") from error
    return f";token={token}"
