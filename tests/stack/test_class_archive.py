"""The archive of Spark's classes: used where it fits, and never in the way."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tidegate.stack import status as status_of
from tidegate.stack.components import server_process as components
from tidegate.stack.components import spark, spark_class_archive
from tidegate.state_store import Settings


@pytest.mark.promise("performance:java-classes-are-archived-at-set-up")
def test_sparks_server_maps_the_archive_that_setup_has_made(stack: Settings) -> None:
    archive = spark.class_archive()
    if archive is None:
        pytest.skip("There is no archive of Spark's classes. Make it: python -m tidegate.stack.components.spark_class_archive")
    (server,) = [psutil.Process(status.pid) for status in status_of(stack) if status.name == "spark"]
    if not hasattr(server, "memory_maps"):
        pytest.skip("This system does not show the files that a process has mapped. Linux does.")

    assert archive in {Path(region.path) for region in server.memory_maps()}


@pytest.mark.promise("performance:java-classes-are-archived-at-set-up")
@pytest.mark.soak
def test_an_archive_that_does_not_fit_is_ignored_silently(tmp_path: Path) -> None:
    archive = tmp_path / "not an archive.jsa"
    archive.write_bytes(b"made by another Java" * 1000)
    with ExitStack() as until:
        embedded = spark.EmbeddedSpark(tmp_path, components.reserve_port(None, until), tmp_path / "no_passwords")
        embedded.initialize(archive=archive)
        server = embedded.component()
        components.start(server, tmp_path)
        until.callback(lambda: components.end(components.members(components.RunFolder(tmp_path))))

        assert components.wait_until(lambda: server.check() is None, server.deadline_seconds)
        log = components.log_file(tmp_path, "spark").read_text()

    assert "archive" not in log.lower()
    assert "[cds]" not in log


@pytest.mark.promise("error:RETRYABLE_ERROR")
def test_a_server_that_is_not_up_in_time_leaves_no_archive_and_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = spark.EmbeddedSpark.component
    monkeypatch.setattr(spark.EmbeddedSpark, "component", lambda server: replace(usual(server), deadline_seconds=0.1))
    monkeypatch.setattr(spark_class_archive, "class_archive_file", lambda: tmp_path / "spark.jsa")

    with pytest.raises(spark_class_archive.RetryableError, match="did not start"):
        spark_class_archive.make()

    assert list(tmp_path.iterdir()) == []
