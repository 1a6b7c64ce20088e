"""A project of one's own: what `init` makes, what is not trusted, and which pipelines are found, whatever modules do."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import in_process
from tests.checkout import python
from tests.cli.conftest import check_schema
from tests.conftest import COMMAND
from tests.store import project
from tidegate.state_store.base.errors import SettingsInvalid

PIPELINE = """\
from tidegate import Count, FixedBatches, Pipeline, State

from ._source import SCHEMA

PIPELINE = Pipeline(
    "orders", FixedBatches([[("a",)]], SCHEMA), {"per_word": State(key={"word": "text"}, aggregates={"n": Count()})}
)
"""
FOUND = """
import json
from tidegate.jobs.registry import all_pipelines, folder
print(json.dumps([folder(), [(p.name, list(p.source.schema)) for p in all_pipelines().pipelines]]))
"""


def tidegate(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a folder, as a shell there would: without the variable that names the project."""
    return python("from tidegate.cli import main; main()", where, *arguments)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    assert in_process.run(["init", "shop"], {}, tmp_path).returncode == 0
    shop = tmp_path / "shop"
    (shop / "pipelines/orders.py").write_text(PIPELINE)
    (shop / "pipelines/_source.py").write_text('SCHEMA = {"word": "string"}\n')
    return shop


@pytest.mark.promise("verb:init", "json:init")
def test_init_makes_what_is_missing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        done = tidegate(tmp_path, "init", "new/shop", "--json")
    finally:
        os.umask(before)
    home = tmp_path / "new/shop"
    made = ["pipelines/", "dags/", "migrations/", "tidegate.toml", ".gitignore"]
    check_schema("init", shown := json.loads(done.stdout))
    assert shown == {"folder": str(home), "written": made}
    assert {name: oct((home / name).stat().st_mode & 0o022) for name in made} == dict.fromkeys(made, "0o0")
    (home / "tidegate.toml").write_text("pg_port = 1\n")
    (home / "dags").rmdir()
    assert json.loads(tidegate(tmp_path, "init", str(home), "--json").stdout)["written"] == ["dags/"]
    assert (home / "tidegate.toml").read_text() == "pg_port = 1\n"
    assert tidegate(home, "settings").returncode == 0


@pytest.mark.promise("decision:0045")
def test_a_projects_pipelines_are_found_from_a_folder_within(shop: Path) -> None:
    (shop / "data/deep").mkdir(parents=True)
    done = python(FOUND, shop / "data/deep")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [str(shop / "pipelines"), [["orders", ["word"]]]]


@pytest.mark.promise("security:another-account-that-can-write-into-project")
@pytest.mark.parametrize("place", ["", "deep", "__pycache__/orders.cpython-311.pyc", "_source.py", "quick.so"])
@pytest.mark.parametrize("part", ["pipelines", "migrations", "dags"])
def test_code_of_other_accounts_is_not_run(shop: Path, part: project.Part, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = shop / part / place
    if place:
        (shop / part / "of_an_editor.py").symlink_to("nowhere")
    (written.parent if written.suffix else written).mkdir(exist_ok=True)
    written.touch()
    written.chmod(0o777)
    monkeypatch.delenv(project.HOME_VARIABLE, raising=False)
    monkeypatch.chdir(shop)
    refused = rf"'{re.escape(str(written))}' can be written by every account, so its code is not run. .*chmod go-w"
    with pytest.raises(SettingsInvalid, match=refused):
        project.own(part)
    if part == "pipelines" and place in ("", "_source.py"):
        done = tidegate(shop, "pipelines")
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
    done = tidegate(shop, "demo")
    assert (done.returncode, "has no pipeline flights and no word_count." in done.stderr) == (2, True)
    assert "make demo in Tidegate's repository" in done.stderr
    assert not (shop / ".tidegate").exists()


def test_an_error_in_a_module_of_pipelines_is_shown_where_its_author_made_it(shop: Path) -> None:
    broken, code = shop / "pipelines/broken.py", 'SOURCE = Files("data", format="csv", schema={"shop": "text"})'
    broken.write_text(f"from tidegate import Files\n\n{code}\n")
    done = tidegate(shop, "explain", "broken")
    first, at, line, *_, last = done.stderr.splitlines()
    assert (done.returncode, first) == (1, "Traceback (most recent call last):")
    assert (at, line) == (f'  File "{broken}", line 3, in <module>', f"    {code}")
    assert last.endswith("'text' is not a type of a column: sources have Spark's types, so string")
    assert done.stderr.count("  File ") == 1


DECLARATION = """
from tidegate.jobs import Count, Files, Pipeline, State
PIPELINE = Pipeline({name!r}, Files("x", format="text"), {{"{name}_state": State({{"value": "text"}}, {{"n": Count()}})}})
"""
LOUD = """
import atexit, os, subprocess, sys, threading, time
os.system("echo program")
sys.__stdout__.write("direct")
atexit.register(print, "at exit")
atexit.register(os.system, "echo a program at exit")
threading.Thread(target=lambda: [print("thread") or time.sleep(0.02) for _ in range(50)]).start()
subprocess.Popen("sleep 1; echo afterwards", shell=True)
sys.stdout.close()
sys.__stdout__.close()
"""
MUTE = "class E(Exception):\n    def __str__(self):\n        raise SystemExit\nraise E"
# A module, and what is said of it: the beginning, and, below the folder, the end.
REFUSED = "SettingsInvalid: "
MODULES = {
    "ends": ("\nimport os\nos._exit(3)", f"{REFUSED}tidegate.jobs.pipelines.ends ends the process", "ends.py, line 3)"),
    "fails": ("\n\n1 / 0", "ZeroDivisionError: division by zero", "fails.py, line 3)"),
    "leaves": ("import asyncio\nraise asyncio.CancelledError", REFUSED, "leaves.py, line 2)"),
    "misnamed": (DECLARATION.format(name="A-b"), "ValueError: 'A-b_state' cannot be the name of a", "misnamed.py, line 3)"),
    "nul": ("\0", "", ")"),
    "parses_not": ("\ndef f(:", "SyntaxError: ", "parses_not.py, line 2)"),
    "says_nothing": (MUTE, "E (its text cannot be made: SystemExit)", "says_nothing.py, line 4)"),
    "stops": ("raise GeneratorExit", REFUSED, "stops.py, line 1)"),
}


def test_whatever_a_module_writes_or_raises_the_others_are_found(tmp_path: Path) -> None:
    (folder := tmp_path / "pipelines").mkdir()
    (folder / "loud.py").write_text(LOUD + DECLARATION.format(name="loud"))
    for name, (code, *_) in MODULES.items():
        (folder / f"{name}.py").write_text(code)
    environment = {"PATH": "/usr/bin:/bin", project.HOME_VARIABLE: str(tmp_path)}
    for closed in ("", ">&-"):
        command = f"{COMMAND} pipelines --json {closed}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, env=environment)
        assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
        for name, (_, begins, ends) in MODULES.items():
            said = f"Pipeline {name} cannot be imported: {begins}"
            assert said in done.stderr
            assert f"{folder}{'/' if ends != ')' else ''}{ends}" in done.stderr.partition(said)[2].partition(" Pipeline ")[0]
        if not closed:
            assert [pipeline["pipeline"] for pipeline in json.loads(done.stdout)] == ["loud"]
            assert {"program", "at exit", "a program at exit", "thread", "afterwards"} <= set(done.stderr.splitlines())


IN_A_THREAD = """
import os, threading
from tidegate.state_store.base import process_exits
with process_exits.as_errors():
    (forks := threading.Thread(target=lambda: os.fork() or os._exit(3))).start()
    forks.join()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
    threading.Thread(target=os._exit, args=[0]).start()
    threading.Event().wait()
"""


def test_a_thread_of_an_authors_code_ends_no_process_as_a_success(tmp_path: Path) -> None:
    done = python(IN_A_THREAD, tmp_path)
    assert (done.returncode, done.stderr) == (1, "A thread of an author's code has ended this process by os._exit(0).\n")
