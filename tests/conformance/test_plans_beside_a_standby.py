"""How a plan ends is noted also while a synchronous standby is away: on a server of the test's own, in `make soak`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from psycopg2 import sql

from tests import steps
from tests.conformance.test_plans import ASKED, NOT_THERE, fail, raising, row
from tests.lone_stack import server, stack, template
from tests.servers import Server
from tidegate.state_store import Settings

__all__ = ["server", "stack", "template"]  # fixtures


@pytest.mark.soak
def test_how_a_plan_ends_is_noted_without_a_wait_for_a_standby(
    settings: Settings, server: Server, register: Callable[..., None]
) -> None:
    register(ASKED)
    names, reload = "ALTER SYSTEM {} synchronous_standby_names {}", sql.SQL("SELECT pg_reload_conf()")
    with ThreadPoolExecutor(1) as pool:
        server.execute(sql.SQL(names.format("SET", "= 'nobody'")))
        server.execute(reload)
        try:
            pool.submit(steps.plan, settings, ASKED, run_id="one").result(60)
            pool.submit(fail, settings, raising(NOT_THERE)).result(60)
        finally:
            server.execute(sql.SQL(names.format("RESET", "")))
            server.execute(reload)
    assert (row(settings).succeeded, row(settings).failed) == (1, 1)
