"""What travels to executors elsewhere, when, under which name; and which packages they need."""

import traceback
from dataclasses import replace
from pathlib import Path

import pytest

from tidegate.jobs.compute.sessions.executor_artifacts import artifacts_for
from tidegate.jobs.spark.task_connections import SessionFile, conninfo_of_tasks
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SettingsInvalid

ELSEWHERE = Settings(spark_remote="sc://spark.example.com:15002")


@pytest.mark.promise("decision:0035")
def test_the_archive_is_named_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "author_of_test" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "code.py").write_text("x = 1")
    (package / "table.json").write_text("{}")
    (package / ".hidden").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    first, again = (artifacts_for(ELSEWHERE, ["author_of_test.inner.code"]) for _ in range(2))
    assert first is not None
    assert again is not None
    assert (first.name, first.archive()) == (again.name, again.archive())
    assert {name for name in first.modules if name.startswith("author_of_test")} == {
        "author_of_test/__init__.py",
        "author_of_test/inner/code.py",
        "author_of_test/inner/table.json",
    }
    assert {
        f"tidegate/{name}" for name in ("__init__.py", "jobs/__init__.py", "state_store/connections/copy_into_staging.py")
    } <= first.modules.keys()
    (package / "table.json").write_text("[]")
    changed = artifacts_for(ELSEWHERE, ["author_of_test.inner.code"])
    assert changed is not None
    assert changed.name != first.name


def test_a_password_file_travels_under_a_name_that_says_nothing(tmp_path: Path) -> None:
    passfile = tmp_path / "pgpass"
    passfile.write_text("*:*:*:tidegate_stager:secret")
    settings = replace(ELSEWHERE, executor_passfile=passfile, executor_conninfo="host=db.internal sslmode=verify-full")
    conninfo, artifacts = conninfo_of_tasks(settings), artifacts_for(settings)
    assert artifacts is not None
    (name,) = artifacts.files
    assert conninfo["passfile"] == SessionFile(name)
    assert artifacts.files[name] == passfile.read_bytes()
    assert "secret" not in f"{conninfo} {artifacts} {artifacts.name}"
    assert (conninfo["host"], conninfo["sslmode"], conninfo["user"]) == ("db.internal", "verify-full", "tidegate_stager")
    passfile.write_text("*:*:*:tidegate_stager:other")
    assert conninfo_of_tasks(settings)["passfile"] != conninfo["passfile"]


@pytest.mark.parametrize(
    ("conninfo", "message"),
    [
        ("host", "executor_conninfo cannot be read"),
        ("host=db password=very hush", "cannot be read: it is no libpq connection string"),
    ],
)
def test_parameters_that_cannot_be_used_are_refused(conninfo: str, message: str) -> None:
    with pytest.raises(SettingsInvalid, match=message) as refusal:
        conninfo_of_tasks(replace(ELSEWHERE, executor_conninfo=conninfo))
    assert "hush" not in "".join(traceback.format_exception(refusal.value))
