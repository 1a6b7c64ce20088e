"""Spark's Python daemon ends when it has nothing to do."""

import socket
import struct
import subprocess
import sys
from contextlib import closing

import psutil
import pytest

from tidegate.stack.components.server_process import wait_until
from tidegate.stack.components.spark import PYTHON_DAEMON, PYTHON_SETTINGS

QUICK = f"import {PYTHON_DAEMON} as it; it.SECONDS_BETWEEN_LOOKS = 0.05; it.main()"


@pytest.mark.promise("decision:0037")
def test_a_daemon_ends_after_its_last_worker_and_not_before() -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-c", QUICK],
        env={"PYTHONPATH": str(PYTHON_SETTINGS), "PYTHON_WORKER_FACTORY_SECRET": "secret", "SPARK_REUSE_WORKER": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert daemon.stdout
    try:
        (port,) = struct.unpack("!i", daemon.stdout.read(4))
        with closing(socket.create_connection(("127.0.0.1", port), 20)) as connection:
            (worker,) = struct.unpack("!i", connection.recv(4))
            assert not wait_until(lambda: daemon.poll() is not None, 1), "it left its worker alone"
            assert psutil.Process(worker).ppid() == daemon.pid

        assert wait_until(lambda: daemon.poll() is not None, 20)
    finally:
        daemon.kill()
        daemon.wait(20)
