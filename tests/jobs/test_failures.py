"""The table of `tidegate.jobs.engine.poison` by row, with real failures: killed servers and workers, lost folders, bad code.

All pipelines here skip poison after one try: a failure that is wrongly taken for content would leave rows out at once.
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.connect.client.core import RpcDeadlines
from pyspark.sql.connect.session import SparkSession as ConnectSession

from tests import steps
from tests.lone_stack import server, stack, template  # noqa: F401 - fixtures: its tests kill servers
from tests.sources.conftest import Inbox
from tidegate.jobs import Files, Pipeline
from tidegate.jobs.compute.sessions import session as spark_module
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import (
    AttemptTimedOut,
    DeclarationInvalid,
    SettingsInvalid,
    SourceChanged,
    SparkFailed,
    SparkUnavailable,
    TidegateError,
)

SCHEMA = {"name": "string", "amount": "int"}
CSV = Files("inbox", format="csv", schema=SCHEMA, max_files=1)
DEADLINE_SECONDS = 240


@pytest.fixture
def inbox(settings: Settings, register: Callable[..., None]) -> Inbox:
    """An empty folder and a pipeline over it."""
    return Inbox(settings, register)


def skipping(inbox: Inbox, transform: Any = None, **pipeline: Any) -> Pipeline:
    """Declare a pipeline that skips a batch after one failure by its content."""
    source = pipeline.pop("source", CSV)
    return inbox.declare(
        source, **{"transform": transform, "on_poison": "skip", "tries": 1, "retry_delay_seconds": 0, **pipeline}
    )


def phase_of(inbox: Inbox, txid: int = 1) -> str:
    """Return the phase of a batch."""
    with StateStore.connect(inbox.settings) as store:
        return store.batch_history("inbox", txid).status.phase


def counted(inbox: Inbox, pipeline: Pipeline) -> dict[str, int]:
    """Return the sum of amounts by name."""
    return {row["name"]: row["amount"] for row in inbox.rows(pipeline)}


def fail(inbox: Inbox, pipeline: Pipeline, error: type[TidegateError]) -> str:
    """Process batch 1, check that it fails without being given up, and return the message."""
    with pytest.raises(error) as failure:
        steps.process(inbox.settings, pipeline, 1, owner="test")
    assert not failure.value.is_poison
    with StateStore.connect(inbox.settings) as store:
        (*_, attempt) = store.batch_history("inbox", 1).attempts
        assert attempt["is_poison"] is False
        assert store.poison_tries("inbox", 1) == 0
        assert not store.turn("inbox", 1).given_up
    assert phase_of(inbox) in ("failed", "halted")
    return str(failure.value)


# content: in a worker of Spark, by classes and SQLSTATEs


def in_a_worker(code: str) -> Callable[[DataFrame], DataFrame]:
    """Return a transform that runs a statement on each batch of rows, in one of Spark's Python workers."""

    def transform(rows: DataFrame) -> DataFrame:
        def run(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                exec(code, {"batch": batch})
                yield batch

        return rows.mapInPandas(run, rows.schema)

    return transform


IN_WORKERS: dict[str, tuple[str, bool]] = {
    "a value": ("int('two')", True),
    "a key": ("{}['two']", True),
    "NULL": ("None.strip()", True),
    "a refusal": ("from tidegate.state_store.base.errors import MalformedRecord; raise MalformedRecord('no')", True),
    "a missing file": ("open('/nonexistent')", False),
    "a refused connection": ("raise ConnectionRefusedError('gone')", False),
    "no memory": ("raise MemoryError", False),
    "a missing package": ("import nonexistent_package", False),
    "sys.exit": ("import sys; sys.exit(0)", False),
    "an interrupt": ("raise KeyboardInterrupt", False),
    "a class of a library": ("import psycopg2; raise psycopg2.OperationalError('gone')", False),
    "a misspelt name": ("nonexistent_name", False),
    "a crash": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", False),
    "an exit": ("import os; os._exit(1)", False),
    "a value that a missing file made": (
        "try:\n  open('/nonexistent')\nexcept OSError:\n  int('two')",
        False,
    ),
}


@pytest.mark.promise("error:SPARK_FAILED")
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("code", "is_content"), IN_WORKERS.values(), ids=IN_WORKERS.keys())
def test_only_errors_about_values_are_content_in_python_code_of_a_transform(
    inbox: Inbox, code: str, *, is_content: bool
) -> None:
    """Other errors may pass: the batch is tried again, and the rows stay."""
    inbox.write("1.csv", "name,amount\na,1\n")
    pipeline = skipping(inbox, in_a_worker(code))
    inbox.plan(pipeline, "run")
    if is_content:
        assert steps.process(inbox.settings, pipeline, 1, owner="test").outcome.startswith("given up")
        steps.commit(inbox.settings, pipeline, 1, owner="test")
        assert phase_of(inbox) == "skipped"
        return
    fail(inbox, pipeline, SparkFailed)
    fixed = skipping(inbox, version=2)
    assert inbox.run(fixed, "second") == [1]
    assert counted(inbox, fixed) == {"a": 1}


IN_SQL: dict[str, tuple[str, type[TidegateError] | None]] = {
    "a cast": ("cast(name AS int) AS amount", None),
    "a division": ("amount div (amount - amount) AS amount", None),
    "an overflow": ("cast(amount + 2147483647 AS int) AS amount", None),
    "raise_error": ("int(raise_error('no')) AS amount", None),
    "a misspelt column": ("amuont AS amount", DeclarationInvalid),
    "a missing function": ("nonexistent(amount) AS amount", DeclarationInvalid),
    "an error that Spark does not name": ("int(java_method('java.lang.Integer', 'parseInt', name)) AS amount", SparkFailed),
}


@pytest.mark.parametrize(("expression", "error"), IN_SQL.values(), ids=IN_SQL.keys())
def test_only_errors_that_spark_attributes_to_a_value_are_content_in_sql(
    inbox: Inbox, expression: str, error: type[TidegateError] | None
) -> None:
    """Its SQLSTATE decides. A missing column would leave out every batch; the code has to be fixed instead."""
    inbox.write("1.csv", "name,amount\na,1\n")
    pipeline = skipping(inbox, lambda rows: rows.selectExpr("name", expression))
    inbox.plan(pipeline, "run")
    if error is None:
        assert steps.process(inbox.settings, pipeline, 1, owner="test").outcome.startswith("given up")
    else:
        fail(inbox, pipeline, error)


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (ValueError("no"), DeclarationInvalid, "The transform failed: ValueError: no"),
        (SystemExit(0), DeclarationInvalid, "The transform failed: SystemExit: 0"),
        (KeyError("x"), DeclarationInvalid, "The transform failed: KeyError: 'x'"),
    ],
)
def test_an_error_of_a_transform_before_it_sees_data_is_of_its_code(
    inbox: Inbox, raised: BaseException, error: type[TidegateError], message: str
) -> None:
    """It would hit every batch, and sys.exit() in it must not end the run as if it had succeeded."""
    inbox.write("1.csv", "name,amount\na,1\n")

    def transform(_rows: DataFrame) -> DataFrame:
        raise raised

    pipeline = skipping(inbox, transform)
    inbox.plan(pipeline, "run")
    assert message in fail(inbox, pipeline, error)


def test_a_transform_without_a_return_fails_and_skips_no_batch(inbox: Inbox) -> None:
    """The author forgot the `return`."""
    inbox.write("1.csv", "name,amount\na,1\n")
    pipeline = skipping(inbox, lambda _rows: None)
    inbox.plan(pipeline, "run")
    assert "The transform returns nothing" in fail(inbox, pipeline, DeclarationInvalid)


# the source


def test_a_folder_that_is_away_leaves_no_rows_out(inbox: Inbox) -> None:
    """An unmounted mount point looks like an empty folder: the batch halts, names the file, and counts when it is back."""
    for number in (1, 2):
        inbox.write(f"{number}.csv", f"name,amount\na,{number}\n")
    pipeline = skipping(inbox)
    inbox.plan(pipeline, "run")
    away = inbox.folder.rename(inbox.folder.with_name("unmounted"))
    inbox.folder.mkdir()
    assert "1.csv is gone since its batch was planned" in fail(inbox, pipeline, SourceChanged)
    assert phase_of(inbox) == "halted"

    inbox.folder.rmdir()
    away.rename(inbox.folder)
    run_pipeline(inbox.settings, pipeline, run_id="second")
    assert counted(inbox, pipeline) == {"a": 3}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_file_system_that_is_unmounted_leaves_no_rows_out(inbox: Inbox) -> None:
    """A real mount, taken away between plan and processing."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(inbox.folder)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"this machine does not let tests mount: {mounted.stderr.strip()}")
    try:
        inbox.write("1.csv", "name,amount\na,1\n")
        kept = inbox.folder.with_name("kept")
        subprocess.run(["cp", "-a", str(inbox.folder), str(kept)], check=True)
        pipeline = skipping(inbox)
        inbox.plan(pipeline, "run")
    finally:
        subprocess.run(["umount", str(inbox.folder)], check=True)
    fail(inbox, pipeline, SourceChanged)

    inbox.folder.rmdir()
    kept.rename(inbox.folder)
    run_pipeline(inbox.settings, pipeline, run_id="second")
    assert counted(inbox, pipeline) == {"a": 1}


# Spark's processes


class Held:
    """A transform whose workers wait until they may go on; the first one leaves its process id in a file."""

    def __init__(self, folder: Path) -> None:
        self._worker, self._go_on = folder / "worker", folder / "go_on"

    def transform(self, rows: DataFrame) -> DataFrame:
        """Let a Python worker of Spark hold the rows."""
        first, go_on = self._worker, self._go_on

        def hold(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                part = first.with_name(f"{first.name}.{os.getpid()}")
                part.write_text(str(os.getpid()))
                part.rename(first)
                while not go_on.exists():
                    time.sleep(0.05)
                yield batch

        return rows.mapInPandas(hold, rows.schema)

    def release(self) -> None:
        """Let all workers go on."""
        self._go_on.touch()

    @contextmanager
    def when_a_worker_holds_rows(self, act: Callable[[int], None]) -> Iterator[None]:
        """Act, in another thread, as soon as a worker holds rows; then let all workers go on."""
        failed: list[Exception] = []

        def watch() -> None:
            try:
                wait_for(self._worker.exists, "a worker")
                act(int(self._worker.read_text()))
            except Exception as error:  # noqa: BLE001 - the test fails with it in the end
                failed.append(error)
            self._go_on.touch()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.release()
            thread.join(DEADLINE_SECONDS)
        assert not failed


@contextmanager
def held_in_spark(inbox: Inbox, **pipeline: Any) -> Iterator[tuple[Pipeline, int, "Processing"]]:
    """Process batch 1 in another thread; yield with the process id of a Python worker once it holds rows."""
    inbox.write("1.csv", "name,amount\na,1\n")
    held, workers = Held(inbox.settings.home), []
    declared = skipping(inbox, held.transform, **pipeline)
    inbox.plan(declared, "run")
    processing = Processing(inbox, declared)
    ended = threading.Event()

    def wait(worker: int) -> None:
        workers.append(worker)
        ended.wait(DEADLINE_SECONDS)

    with held.when_a_worker_holds_rows(wait):
        processing.start()
        try:
            wait_for(lambda: workers, "a worker")
            yield declared, workers[0], processing
        finally:
            ended.set()
    processing.join(DEADLINE_SECONDS)


class Processing(threading.Thread):
    """Processes batch 1 and keeps the error, if any."""

    def __init__(self, inbox: Inbox, pipeline: Pipeline) -> None:
        super().__init__(daemon=True)
        self._inbox = inbox
        self._pipeline = pipeline
        self.error: Exception | None = None

    def run(self) -> None:
        """Process, and keep the error."""
        try:
            steps.process(self._inbox.settings, self._pipeline, 1, owner="test")
        except Exception as error:  # noqa: BLE001 - the test checks it
            self.error = error

    def ended(self) -> Exception | None:
        """Wait for the end, and return the error."""
        self.join(DEADLINE_SECONDS)
        assert not self.is_alive()
        return self.error


def wait_for(condition: Callable[[], object], name: str) -> None:
    """Wait until a condition holds."""
    ends_at = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < ends_at, f"{name} did not come"
        time.sleep(0.05)


def server_process(stack: Settings, component: str) -> int:
    """Return the process id of one of the stack's servers, from the supervisor's status; wait while it is started again."""
    found: list[int] = []

    def is_noted() -> bool:
        status = json.loads((stack.stack_folder / "run" / "stack.status").read_text())
        found.extend(filter(None, [status["components"][component]["pid"]]))
        return bool(found)

    wait_for(is_noted, f"a process of {component}")
    return found[0]


def wait_until_spark_answers(settings: Settings) -> None:
    """Wait until a new Spark server computes."""

    def answers() -> bool:
        try:
            with spark_session(settings, "inbox") as spark:
                return spark.range(1).count() == 1
        except TidegateError:
            return False

    wait_for(answers, "Spark")


@pytest.mark.promise("fault:spark-executor-or-worker-process-dies:processing")
def test_a_worker_that_is_killed_leaves_no_rows_out(inbox: Inbox) -> None:
    """The kernel does so when memory runs out."""
    with held_in_spark(inbox) as (_, worker, processing):
        os.kill(worker, signal.SIGKILL)
        error = processing.ended()
    assert isinstance(error, SparkFailed)
    assert phase_of(inbox) == "failed"
    pipeline = skipping(inbox, version=2)
    inbox.run(pipeline, "second")
    assert counted(inbox, pipeline) == {"a": 1}


def test_an_attempt_that_takes_too_long_leaves_no_rows_out(inbox: Inbox) -> None:
    """The machine may be busy; the rows are not to blame."""
    inbox.write("1.csv", "name,amount\na,1\n")
    held = Held(inbox.settings.home)
    pipeline = skipping(inbox, held.transform, message_timeout_seconds=4)
    inbox.plan(pipeline, "run")
    try:  # on a slow machine, the time is over before a worker has come
        fail(inbox, pipeline, AttemptTimedOut)
    finally:
        held.release()
    assert phase_of(inbox) == "failed"


def test_a_spark_server_that_dies_in_mid_batch_leaves_no_rows_out(inbox: Inbox, stack: Settings) -> None:
    """After kill -9 of its JVM, later attempts go on with the new server, also in the same thread."""
    with held_in_spark(inbox) as (_, _, processing):
        os.kill(server_process(stack, "spark"), signal.SIGKILL)
        error = processing.ended()
    wait_until_spark_answers(inbox.settings)
    assert isinstance(error, SparkUnavailable)
    assert phase_of(inbox) == "failed"
    pipeline = skipping(inbox, version=2)
    inbox.run(pipeline, "second")
    assert counted(inbox, pipeline) == {"a": 1}


@pytest.mark.promise("fault:spark-server-dies-or-hangs:processing", "limit:LONGEST_SERVER_SILENCE_SECONDS")
def test_a_spark_server_that_stands_still_is_given_up(inbox: Inbox, stack: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections without answering, as on a machine that swaps: it counts as away, and no row is left out."""
    monkeypatch.setattr(spark_module, "LONGEST_SERVER_SILENCE_SECONDS", 3.0)
    monkeypatch.setattr(spark_module, "HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr(spark_module, "DEADLINES", RpcDeadlines(config=2, interrupt=2, get_status=2, release_session=2))
    server = server_process(stack, "spark")
    with held_in_spark(inbox) as (_, _, processing):
        os.kill(server, signal.SIGSTOP)
        try:
            error = processing.ended()
        finally:
            os.kill(server, signal.SIGCONT)
    assert isinstance(error, SparkUnavailable)
    assert "has not answered for 3 s, though it is there" in str(error)
    assert phase_of(inbox) == "failed"
    pipeline = skipping(inbox, version=2)
    inbox.run(pipeline, "second")
    assert counted(inbox, pipeline) == {"a": 1}


def test_a_session_that_failed_is_not_the_active_one_of_its_thread(settings: Settings, tmp_path: Path) -> None:
    """PySpark keeps a thread's first session as the active one, and would ask it about types in text form for ever."""
    wrong = tmp_path / "token"
    wrong.write_text("wrong")

    with (
        pytest.raises(SettingsInvalid, match="refuses the token"),
        spark_session(replace(settings, spark_token_file=wrong), "x"),
    ):
        pass
    assert SparkSession.getActiveSession() is None
    assert ConnectSession._default_session is None
