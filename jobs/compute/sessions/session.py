"""Spark Connect sessions: settings that exactly-once needs, and the channel to the server."""

import logging
import os
import socket
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import grpc
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.connect.client import DefaultChannelBuilder
from pyspark.sql.connect.client.core import RpcDeadlines
from pyspark.sql.connect.client.retries import DefaultPolicy
from pyspark.sql.connect.session import SparkSession as ConnectSession

from tidegate.jobs.compute.sessions.executor_artifacts import Artifacts, artifacts_for, code_of, further_modules
from tidegate.jobs.compute.sessions.executor_packages import check_executors
from tidegate.jobs.spark.library_internals import add_artifacts, leave_on_server, set_deadlines
from tidegate.jobs.spark.port_owner import Server, can_see_all, loopback_address, trusted_users
from tidegate.jobs.spark.spark_errors import meaning_of
from tidegate.state_store.base.errors import SettingsInvalid, SparkUnavailable, TidegateError
from tidegate.state_store.base.settings import Settings

logger = logging.getLogger(__name__)

REACH_TIMEOUT_SECONDS = 5
SPARK_LOGIN = "Spark's token"
# So short that an attempt keeps reporting that it is alive; queries have no deadline.
DEADLINES = RpcDeadlines(config=20, interrupt=20, get_status=20, release_session=20)
# Spark's client retries a call for as long as a server's restart may take; after that, the whole batch is tried again.
SERVER_RETRIES, MAX_BACKOFF_MILLISECONDS = 8, 10_000
MAX_CLOSED_SESSIONS = 1000  # as many as a server remembers
PINNED = {
    "spark.sql.session.timeZone": "UTC",  # a date of a timestamp must not depend on where the batch runs
    "spark.sql.ansi.enabled": "true",  # overflow and bad casts fail; they never become NULL or wrap
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    # these rules would remove the counting of source rows from a query without a result, such as a join with an empty input
    "spark.sql.optimizer.excludedRules": "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation",
    "spark.sql.adaptive.optimizer.excludedRules": "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation",
    # Spark assumes that data read by Python has a few bytes, and would broadcast it for a join, however large it is. Adaptive
    # execution, after a shuffle, knows the true size of a side; authors may still call broadcast()
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.adaptive.autoBroadcastJoinThreshold": str(10 * 1024**2) + "b",
    # keep whole tracebacks, with the exceptions that were being handled: `tidegate.jobs.spark.spark_errors` reads them
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
    # a cached plan keeps its list of files: the next process reads the same path, and would get the old lengths
    "spark.connect.session.planCache.enabled": "false",
    "spark.sql.csv.parser.columnPruning.enabled": "false",  # a ragged record is found even if its columns are not used
}
QUICK = {
    # use the fast hash map of compiled code also in a task that groups a whole batch, with room for 2^n groups
    "spark.sql.codegen.aggregate.map.twolevel.partialOnly": "false",
    "spark.sql.codegen.aggregate.fastHashMap.capacityBit": "20",  # by default 65,536
}
# With a limit in bytes, Spark computes the size of an Arrow batch for Python before each row that it adds. UNLIMITED leaves
# only the limit of 10,000 rows. LIMITED is Spark's default.
BYTES_PER_ARROW_BATCH = "spark.sql.execution.arrow.maxBytesPerBatch"
LIMITED, UNLIMITED = str(64 * 1024**2) + "b", str(2**31 - 1)
ARRIVED = "spark.tidegate.arrived"  # the session setting that names the artifacts which the session has
_application_ids: WeakKeyDictionary[SparkSession, str] = WeakKeyDictionary()


@contextmanager
def spark_session(
    settings: Settings,
    pipeline: str,
    *,
    rows_are_short: bool = False,
    modules: Collection[str] = (),
    packages: Collection[str] = (),
) -> Iterator[SparkSession]:
    """Join the pipeline's session, with the settings PINNED and QUICK; leave it on the server for the next batch.

    `rows_are_short` promises that Python gets no long rows, so that only their number has to be limited. Authors' `modules`
    are sent to executors on other machines, where `packages` must be installed.

    All batches of a pipeline share one session, because Spark starts Python workers per session, and slowly. When authors'
    code changes, a new session is used, because workers keep what they have imported.

    Raises: SparkUnavailable if nothing listens at the address, SettingsInvalid for a wrong address, token file or module,
    ListenerNotTrusted if an untrusted account listens there, ExecutorsUnprepared if executors lack a package.
    """
    check_reachable(settings)
    artifacts = artifacts_for(settings, modules, packages)
    code = code_of({*modules, *further_modules(settings)}) if artifacts is None else artifacts.name
    try:
        session = _join(settings, f"{pipeline}/{code}", rows_are_short, artifacts)
    except (PySparkException, grpc.RpcError) as error:
        raise meaning_of(error) from error
    try:
        yield session
    finally:
        leave_on_server(session)


def application_of(session: SparkSession) -> str:
    """Return the Spark application's id of a session from `spark_session`, without a round trip."""
    return _application_ids[session]


def _join(settings: Settings, name: str, rows_are_short: bool, artifacts: Artifacts | None) -> SparkSession:
    """Return the shared session of this name, created if necessary; its successor if the server has closed it."""
    # Pipelines of two ledgers may have the same name; in one session, they would interrupt each other's attempts.
    ledger = f"{settings.pg_host}:{settings.pg_port}/{settings.pg_database}"
    for generation in range(MAX_CLOSED_SESSIONS):
        session_id = uuid.uuid5(uuid.NAMESPACE_URL, f"tidegate:{ledger}/{name}/{generation}")
        session = _connect(_Channel(settings, str(session_id)))
        set_deadlines(session, DEADLINES)
        session.client.set_retry_policies([DefaultPolicy(max_retries=SERVER_RETRIES, max_backoff=MAX_BACKOFF_MILLISECONDS)])
        try:
            _configure(session, settings, rows_are_short)
            if artifacts is not None:
                _send(artifacts, session, settings.staging_connections)
        except BaseException as error:
            leave_on_server(session)  # PySpark would keep a failed session as this thread's active one
            if not isinstance(error, PySparkException) or "INVALID_HANDLE" not in str(error):
                raise
        else:
            return session
    raise SparkUnavailable(f"The Spark server closed {MAX_CLOSED_SESSIONS} sessions of {name}. Restart it.")


def _send(artifacts: Artifacts, session: SparkSession, tasks: int) -> None:
    """Send what tasks need to a session, unless it has that already, and check its executors.

    Several processes may do so at once: the server accepts the same content from each.
    """
    if session.conf.get(ARRIVED, None) == artifacts.name:
        return
    add_artifacts(session, {artifacts.code: artifacts.archive()}, artifacts.files)
    check_executors(session, tasks, artifacts.packages)
    session.conf.set(ARRIVED, artifacts.name)
    logger.info("Spark's session has %s", artifacts.name)


def _configure(session: SparkSession, settings: Settings, rows_are_short: bool) -> SparkSession:
    expected = {
        **PINNED,
        **QUICK,
        BYTES_PER_ARROW_BATCH: UNLIMITED if rows_are_short else LIMITED,
        # Each shuffle partition stages over a connection of its own; for small batches, adaptive execution uses fewer.
        "spark.sql.shuffle.partitions": str(settings.staging_connections),
    }
    current = session.conf.getAll  # one round trip; a shared session has usually been configured already
    for name, value in expected.items():
        if current.get(name) != value:
            session.conf.set(name, value)
    _application_ids[session] = current.get("spark.app.id", "unknown")
    return session


def _connect(channel: "_Channel") -> SparkSession:
    """Return a Spark Connect session over a channel; Spark's own builder takes only an address."""
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"  # as Spark's own builder does, so that functions return Connect's columns
    # Connect's session has the methods of SparkSession without being a subclass.
    return cast(Any, ConnectSession.Builder().channelBuilder(channel).create())  # type: ignore[no-any-return]


class _Channel(DefaultChannelBuilder):
    """The channel to the server: loopback names are not resolved, and no token goes to an untrusted process.

    For another machine, it is pyspark's own channel, with TLS if there is a token.
    """

    def __init__(self, settings: Settings, session_id: str) -> None:
        super().__init__(settings.spark_remote)
        self._settings = settings
        self.set("user_id", "tidegate")
        self.set("session_id", session_id)
        if token := _token(settings):
            self.set("token", token)

    def toChannel(self) -> grpc.Channel:  # noqa: N802 - as pyspark calls it
        """Return the channel, not connected yet."""
        address = loopback_address(self.url.hostname)
        if address is None or self.use_ssl:
            return super().toChannel()
        target = f"ipv6:[{address}]:{self._port}" if ":" in address else f"ipv4:{address}:{self._port}"
        self.setChannelOption("grpc.enable_http_proxy", 0)  # a proxy would see the token
        if self.token is None:
            return self._insecure_channel(target)
        login = _Login(Server(address, self._port, SPARK_LOGIN, trusted_users(self._settings)), self.token)
        return self._secure_channel(
            target,
            grpc.composite_channel_credentials(grpc.local_channel_credentials(), grpc.metadata_call_credentials(login)),
        )


class _Login(grpc.AuthMetadataPlugin):  # type: ignore[misc]  # grpc has no types
    """Gives each call the token, if the server belongs to this account, root or a trusted one."""

    def __init__(self, server: Server, token: str) -> None:
        self._server = server
        self._token = token

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:  # noqa: ARG002
        """Pass on the token, or an untrusted listener's error: the call then fails, and is retried."""
        try:
            if can_see_all():  # on other systems the check takes too long for each call
                self._server.check()
        except (TidegateError, OSError) as error:
            callback((), error)
        else:
            callback((("authorization", f"Bearer {self._token}"),), None)


def check_reachable(settings: Settings) -> None:
    """Fail at once if the server cannot be reached, where Spark's client would retry.

    Raises: SparkUnavailable, SettingsInvalid, ListenerNotTrusted.
    """
    remote = settings.spark_remote
    try:
        address = urlsplit(remote)
        port = address.port or 15002
    except ValueError:
        address, port = urlsplit(""), 0
    if address.scheme != "sc" or not address.hostname:
        raise SettingsInvalid(f"spark_remote must be like sc://host:15002, not {remote!r}. See: tidegate settings")
    host = loopback_address(address.hostname) or address.hostname
    try:
        with socket.create_connection((host, port), REACH_TIMEOUT_SECONDS):
            if settings.spark_token_file and loopback_address(host) and "use_ssl=true" not in remote:
                Server(host, port, SPARK_LOGIN, trusted_users(settings)).check()
    except OSError as error:
        raise SparkUnavailable(f"Nothing answers at {host}:{port} for Spark: {error}. Start it: tidegate up") from error


def _token(settings: Settings) -> str | None:
    if settings.spark_token_file is None:
        return None
    try:
        return settings.spark_token_file.read_text().strip()
    except OSError as error:
        raise SettingsInvalid(f"The Spark token file {settings.spark_token_file} cannot be read: {error.strerror}.") from error
