"""A project of one's own: what `init` makes, which pipelines are found there, and what is not trusted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import check_schema
from tests.store import project
from tidegate.state_store.base.errors import SettingsInvalid

REPOSITORY = Path(__file__).resolve().parents[2]
MAIN = "from tidegate.cli import main; main()"
PIPELINE = """\
from tidegate import Count, FixedBatches, Pipeline, State

from ._source import SCHEMA

PIPELINE = Pipeline(
    "orders", FixedBatches([[("a",)]], SCHEMA), {"per_word": State(key={"word": "text"}, aggregates={"n": Count()})}
)
"""
FOUND = (
    "import json; from tidegate.jobs.registry import all_pipelines, folder; "
    "print(json.dumps([folder(), [(p.name, list(p.source.schema)) for p in all_pipelines().pipelines]]))"
)


def run(code: str, *arguments: str, where: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, as a shell there would: without the variable that names the project, unless it is given."""
    environment = {name: value for name, value in os.environ.items() if name != project.HOME_VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=where,
        env={**environment, "PYTHONPATH": str(REPOSITORY), **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    assert run(MAIN, "init", "shop", where=tmp_path).returncode == 0
    shop = tmp_path / "shop"
    (shop / "pipelines/orders.py").write_text(PIPELINE)
    (shop / "pipelines/_source.py").write_text('SCHEMA = {"word": "string"}\n')
    return shop


@pytest.mark.promise("verb:init", "json:init")
def test_init_makes_what_is_missing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        done = run(MAIN, "init", "new/shop", "--json", where=tmp_path)
    finally:
        os.umask(before)
    home = tmp_path / "new/shop"
    made = ["pipelines/", "dags/", "migrations/", "tidegate.toml", ".gitignore"]
    check_schema("init", shown := json.loads(done.stdout))
    assert shown == {"folder": str(home), "written": made}
    assert {name: oct((home / name).stat().st_mode & 0o022) for name in made} == dict.fromkeys(made, "0o0")

    (home / "tidegate.toml").write_text("pg_port = 1\n")
    (home / "dags").rmdir()
    assert json.loads(run(MAIN, "init", str(home), "--json", where=tmp_path).stdout)["written"] == ["dags/"]
    assert (home / "tidegate.toml").read_text() == "pg_port = 1\n"
    assert run(MAIN, "settings", where=home).returncode == 0


@pytest.mark.promise("decision:0045")
@pytest.mark.parametrize("where", ["", "data/deep"])
def test_a_projects_pipelines_are_found(shop: Path, where: str) -> None:
    (shop / "data/deep").mkdir(parents=True)
    done = run(FOUND, where=shop / where)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [str(shop / "pipelines"), [["orders", ["word"]]]]


@pytest.mark.promise("security:another-account-that-can-write-into-project")
@pytest.mark.parametrize("place", ["", "deep", "__pycache__/orders.cpython-311.pyc", "_source.py", "quick.so"])
@pytest.mark.parametrize("part", ["pipelines", "migrations", "dags"])
def test_code_that_others_may_have_written_is_not_run(
    shop: Path, part: project.Part, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = shop / part / place
    if place:
        (shop / part / "of_an_editor.py").symlink_to("nowhere")
    if written.suffix:
        written.parent.mkdir(exist_ok=True)
        written.touch()
    else:
        written.mkdir(exist_ok=True)
    written.chmod(0o777)
    monkeypatch.delenv(project.HOME_VARIABLE, raising=False)
    monkeypatch.chdir(shop)
    refused = rf"'{re.escape(str(written))}' can be written by every account, so its code is not run. .*chmod go-w"
    with pytest.raises(SettingsInvalid, match=refused):
        project.own(part)
    if part == "pipelines" and place in ("", "_source.py"):
        done = run(MAIN, "pipelines", where=shop)
        assert (done.returncode, "its code is not run" in done.stderr) == (1, True)
    monkeypatch.setenv(project.HOME_VARIABLE, str(shop))
    assert project.own(part) == shop / part
    monkeypatch.setenv(project.FOUND_VARIABLE, "1")  # as in a task of a stack
    with pytest.raises(SettingsInvalid, match=refused):
        project.own(part)


def test_code_in_a_folder_that_is_linked_is_looked_at(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shared := tmp_path / "shared" / "deep").mkdir(parents=True)
    (shared / "prices.py").touch()
    (shop / "pipelines" / "shared").symlink_to(shared.parent)
    (shared / "around").symlink_to(shop / "pipelines")
    monkeypatch.delenv(project.HOME_VARIABLE, raising=False)
    monkeypatch.chdir(shop)
    assert project.own("pipelines") == shop / "pipelines"
    (shared / "prices.py").chmod(0o666)
    with pytest.raises(SettingsInvalid, match=r"shared/deep/prices\.py' can be written by every account"):
        project.own("pipelines")


@pytest.mark.promise("verb:demo")
def test_the_demo_is_for_the_examples(shop: Path) -> None:
    done = run(MAIN, "demo", where=shop)
    assert (done.returncode, "has no pipeline flights and no word_count." in done.stderr) == (2, True)
    assert "make demo in Tidegate's repository" in done.stderr
    assert not (shop / ".tidegate").exists()


def test_an_error_in_a_module_of_pipelines_is_shown_where_its_author_made_it(shop: Path) -> None:
    broken, code = shop / "pipelines/broken.py", 'SOURCE = Files("data", format="csv", schema={"shop": "text"})'
    broken.write_text(f"from tidegate import Files\n\n{code}\n")
    done = run(MAIN, "explain", "broken", where=shop)
    first, at, line, *_, last = done.stderr.splitlines()
    assert (done.returncode, first) == (1, "Traceback (most recent call last):")
    assert (at, line) == (f'  File "{broken}", line 3, in <module>', f"    {code}")
    assert last.endswith("'text' is not a type of a column: sources have Spark's types, so string")
    assert done.stderr.count("  File ") == 1
