"""Spark's Python daemon ends when it has nothing to do, and a later batch does not notice."""

import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.stack.components.server_process import wait_until
from tidegate.stack.components.spark import PYTHON_DAEMON
from tidegate.state_store import Settings

pytestmark = pytest.mark.skipif("CLUSTER" not in os.environ, reason="the long form, which waits for minutes: make cluster-test")

# A minute until Spark ends idle workers, up to ten seconds until it looks, two minutes of the daemon; and a slow machine.
SECONDS = 400


@pytest.mark.promise("decision:0037")
def test_a_session_goes_on_after_its_daemon_has_ended(settings: Settings) -> None:
    """Memory of an idle pipeline is given back, and its next query in the same session gets another daemon."""
    port = urlsplit(settings.spark_remote).port
    (server,) = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == psutil.CONN_LISTEN}

    def daemons() -> set[int]:
        return {child.pid for child in psutil.Process(server).children() if _is_daemon(child)}

    def sums() -> list[Any]:
        with spark_session(settings, "daemons") as spark:
            return spark.range(0, 1000, numPartitions=2).mapInArrow(_unchanged, "id bigint").groupBy().sum("id").collect()

    before = daemons()
    expected = sums()
    (ours,) = daemons() - before

    assert wait_until(lambda: ours not in daemons(), SECONDS, every=1)
    assert sums() == expected == [(sum(range(1000)),)]
    assert len(daemons() - before) == 1


def _is_daemon(process: psutil.Process) -> bool:
    try:
        return PYTHON_DAEMON in process.cmdline()
    except psutil.NoSuchProcess:  # or it has ended, and its parent has yet to notice
        return False


def _unchanged(batches: Iterator[Any]) -> Iterator[Any]:
    yield from batches
