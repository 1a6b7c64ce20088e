"""Java libraries that tests need, from Maven Central; without a way there, their tests are skipped."""

import subprocess
import sys

import pytest

from tidegate.stack.components import java_libraries, kafka
from tidegate.state_store.base.errors import PermanentError

S3PROXY = "org.gaul:s3proxy:2.6.0"
AHEAD = "import sys; from tidegate.stack.components import java_libraries; java_libraries.fetch(sys.argv[1:])"


def fetch_or_skip(*packages: str) -> None:
    """Fetch libraries into the user's cache; skip the test if Maven Central does not answer or lacks them."""
    try:
        java_libraries.fetch(packages)
    except PermanentError as error:
        if "cannot be fetched from Maven Central" not in str(error):
            raise
        pytest.skip(str(error))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin to fetch, in processes of their own, what a run of all tests would wait for on a new machine."""
    if getattr(session.config.option, "numprocesses", None):  # in the process that starts the others
        for packages in (kafka.SPARK_PACKAGES, [S3PROXY]):
            if not java_libraries.folder(packages).is_dir():
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                subprocess.Popen([sys.executable, "-c", AHEAD, *packages], **quiet)
