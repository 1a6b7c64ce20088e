"""Makes the archive of Spark's classes (AppCDS), once per environment, as the last step of ``make setup``.

Java maps the archive instead of finding, reading and checking 20,000 classes, which is two fifths of the CPU time of the
server's start and first batch. Java itself checks whether the archive still fits; without one, it reads the classes as usual.

Run as ``python -m tidegate.stack.components.spark_class_archive``.
"""

import contextlib
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tidegate.jobs.compute.sessions.warm_up import warm_up
from tidegate.stack.components import server_process as components
from tidegate.stack.components.spark import EmbeddedSpark, check_java, class_archive_file
from tidegate.state_store.base.errors import PermanentError, RetryableError, TidegateError
from tidegate.state_store.base.settings import Settings

WRITE_SECONDS = 180


def make() -> Path:
    """Run a server and a few small queries, have Java archive the classes that were used, and return the archive.

    An earlier archive is replaced by a complete one or not at all.

    Raises: PermanentError (no Java, or it cannot make archives; no place to write it), RetryableError (Spark did not start).
    """
    check_java()
    archive = class_archive_file()
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
            unfinished = Path(folder) / archive.name
            _run_once(Path(folder), unfinished)
            unfinished.replace(archive)
    except OSError as error:
        raise PermanentError(f"{archive} cannot be written: {error.strerror}.") from error
    return archive


def _run_once(folder: Path, archive: Path) -> None:
    with contextlib.ExitStack() as until:
        spark = EmbeddedSpark(folder, components.reserve_port(None, until), stager_passfile=folder / "no_passwords")
        spark.initialize()
        server = spark.component()
        # Spark passes these to the server's Java, and to no other.
        writing = {"SPARK_SUBMIT_OPTS": f'-XX:TieredStopAtLevel=1 -Xlog:disable -XX:ArchiveClassesAtExit="{archive}"'}
        process = components.start(replace(server, environment={**server.environment, **writing}), folder)
        until.callback(lambda: components.end(components.members(components.RunFolder(folder))))
        if not components.wait_until(lambda: process.poll() is not None or server.check() is None, server.deadline_seconds):
            raise RetryableError("Spark's server did not start.")
        if process.poll() is None:
            warm_up(Settings(home=folder, spark_remote=spark.remote, spark_token_file=spark.token_file), folder)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(WRITE_SECONDS)
        if not archive.exists():
            raise PermanentError(f"Java wrote none. {components.log_file(folder, 'spark').read_text()[-500:]}")


def main() -> None:
    """Make the archive, or say why that failed: nothing depends on it."""
    try:
        make()
    except TidegateError as error:
        sys.stderr.write(f"Spark will start some seconds slower, without an archive of its classes: {error}\n")


if __name__ == "__main__":
    main()
