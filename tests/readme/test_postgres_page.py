"""The blocks of docs/postgres.md: the script is the one that is printed, the settings are some that are used."""

import json
import os
import subprocess
from pathlib import Path

from tests.conftest import COMMAND
from tests.readme.pages import blocks
from tidegate.state_store import Settings


def test_the_script_for_administrators_is_the_printed_one(tmp_path: Path) -> None:
    """No server is needed for it. Servers are prepared by it in tests/cluster/test_managed_postgres.py."""
    environ = {**os.environ, "TIDEGATE_HOME": str(tmp_path)}
    command = [COMMAND, "migrate", "--print-roles"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert [done.stdout] == blocks("postgres.md", "sql")
    as_json = subprocess.run([*command, "--json"], env=environ, capture_output=True, text=True, check=True)
    assert json.loads(as_json.stdout) == {"sql": done.stdout}


def test_the_settings_reach_every_connection(tmp_path: Path) -> None:
    """Of all roles, because each connects with these parameters."""
    secured, replicated = blocks("postgres.md", "toml")
    (tmp_path / "tidegate.toml").write_text(secured)
    conninfo = Settings.load({"TIDEGATE_HOME": str(tmp_path)}).conninfo(user="tidegate_stager")
    assert conninfo["sslmode"] == "verify-full"
    assert conninfo["sslrootcert"] == str(tmp_path / "secrets/authorities.crt")
    assert "target_session_attrs" not in conninfo
    (tmp_path / "tidegate.toml").write_text(replicated)
    settings = Settings.load({"TIDEGATE_HOME": str(tmp_path)})
    assert settings.pg_failover == "go-on"
    assert settings.conninfo()["target_session_attrs"] == "read-write"
    assert settings.conninfo()["host"] == "db-1.example,db-2.example"
