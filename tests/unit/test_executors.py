"""What travels to executors elsewhere, when, under which name; and which packages they need."""

import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tidegate.jobs import registry
from tidegate.jobs.compute.sessions.executor_artifacts import artifacts_for, code_of
from tidegate.jobs.spark.task_connections import SessionFile, conninfo_of_tasks
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SettingsInvalid

ELSEWHERE = Settings(spark_remote="sc://spark.example.com:15002")


@pytest.mark.promise("decision:0035")
def test_the_archive_is_named_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"__init__.py": "", "inner/code.py": "x = 1", "inner/table.json": "{}", "inner/.hidden": ""}.items():
        (file := tmp_path / "author_of_test" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    sent = partial(artifacts_for, ELSEWHERE, ["author_of_test.inner.code"])
    first, again = (sent() for _ in range(2))
    assert (first.name, first.archive()) == (again.name, again.archive())
    theirs = {"__init__.py", "inner/code.py", "inner/table.json"}
    assert {name for name in first.modules if "author_of_test" in name} == {f"author_of_test/{name}" for name in theirs}
    ours = ("__init__.py", "jobs/__init__.py", "state_store/connections/copy_into_staging.py")
    assert {f"tidegate/{name}" for name in ours} <= first.modules.keys()
    (tmp_path / "author_of_test/inner/table.json").write_text("[]")
    assert sent().name != first.name


def test_links_that_emacs_makes_are_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "folder", lambda: str(tmp_path))
    (tmp_path / "orders.py").write_text("x = 1")
    before = code_of([])
    (tmp_path / ".#orders.py").symlink_to("anna@laptop.4711:1700000000")  # while there are unsaved changes
    assert code_of([]) == before


def test_a_password_file_travels_under_a_name_that_says_nothing(tmp_path: Path) -> None:
    passfile = tmp_path / "pgpass"
    passfile.write_text("*:*:*:tidegate_stager:secret")
    settings = replace(ELSEWHERE, executor_passfile=passfile, executor_conninfo="host=db.internal sslmode=verify-full")
    conninfo, artifacts = conninfo_of_tasks(settings), artifacts_for(settings, [])
    (name,) = artifacts.files
    assert conninfo["passfile"] == SessionFile(name)
    assert artifacts.files[name] == passfile.read_bytes()
    assert "secret" not in f"{conninfo} {artifacts} {artifacts.name}"
    assert (conninfo["host"], conninfo["sslmode"], conninfo["user"]) == ("db.internal", "verify-full", "tidegate_stager")
    passfile.write_text("*:*:*:tidegate_stager:other")
    assert conninfo_of_tasks(settings)["passfile"] != conninfo["passfile"]


@pytest.mark.parametrize("conninfo", ["host", "host=db password=very hush"])
def test_parameters_that_cannot_be_used_are_refused(conninfo: str) -> None:
    with pytest.raises(SettingsInvalid, match="executor_conninfo cannot be read: it is no libpq connection string") as refusal:
        conninfo_of_tasks(replace(ELSEWHERE, executor_conninfo=conninfo))
    assert "hush" not in "".join(traceback.format_exception(refusal.value))
