"""The blocks of docs/spark-cluster.md: settings and SQL here; the properties of Spark run in `tests.cluster`."""

# ruff: noqa: F811
import dataclasses
import re
from pathlib import Path

import psycopg2
import pytest
from psycopg2 import sql

from tests.lone_stack import server, stack, template  # noqa: F401 - fixtures: a role's limit is changed
from tests.readme.pages import DOCUMENTS, blocks
from tests.servers import Server
from tests.store import connect
from tidegate.jobs.compute.sessions.executor_artifacts import artifacts_for
from tidegate.jobs.spark.task_connections import SessionFile, are_elsewhere, conninfo_of_tasks
from tidegate.state_store import Settings


def test_the_settings_are_understood(tmp_path: Path) -> None:
    """They lead executors to the named host, with the file that travels; the table lists all settings of executors."""
    (tmp_path / "tidegate.toml").write_text(blocks("spark-cluster.md", "toml")[0])
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "pgpass_stager").write_text("db.internal:*:*:tidegate_stager:secret\n")
    settings = Settings.load({"TIDEGATE_HOME": str(tmp_path)})
    conninfo, artifacts = conninfo_of_tasks(settings), artifacts_for(settings)

    assert are_elsewhere(settings)
    assert artifacts is not None
    assert conninfo["passfile"] == SessionFile(next(iter(artifacts.files)))
    assert conninfo["sslmode"] == "verify-full"
    assert conninfo["host"] == "db.internal"
    of_executors = {f.name for f in dataclasses.fields(Settings) if "executor" in f.name}
    listed = set(re.findall(r"^\| `(\w+)` \|", (DOCUMENTS / "spark-cluster.md").read_text(), re.MULTILINE))
    assert of_executors <= listed


@pytest.mark.soak
def test_the_limit_is_waited_for(settings: Settings, server: Server) -> None:
    """While the role has no free connection a task waits; it gets one, or the refusal when its time is over."""
    conninfo = settings.conninfo(user=settings.pg_stager)
    server.execute(sql.SQL(blocks("spark-cluster.md", "sql")[0]))
    try:
        (limit,) = server.execute(sql.SQL("SELECT rolconnlimit FROM pg_roles WHERE rolname = 'tidegate_stager'"))[0]
        assert limit == 64
        server.execute(sql.SQL("ALTER ROLE tidegate_stager CONNECTION LIMIT 1"))
        first = connect(conninfo)
        with pytest.raises(psycopg2.OperationalError, match="too many connections for role"):
            connect(conninfo, longest_wait_seconds=0.5)
        first.close()
        connect(conninfo).close()
    finally:
        server.execute(sql.SQL("ALTER ROLE tidegate_stager CONNECTION LIMIT -1"))
