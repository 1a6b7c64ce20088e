"""Pipelines are found by name, and a wrong name gets a useful answer."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.conftest import COMMAND
from tests.store import HOME_VARIABLE
from tidegate.jobs import Pipeline, registry
from tidegate.jobs.registry import ENTRY_POINTS, all_pipelines, find_pipeline, has_pipeline, named_rebuild, pipeline_names
from tidegate.state_store.base.errors import UnknownPipeline

DECLARATION = """
from tidegate.jobs import Count, Files, Pipeline, State
PIPELINE = Pipeline({name!r}, Files("x", format="text"), {{"{name}_state": State({{"value": "text"}}, {{"n": Count()}})}})
"""


def test_every_pipeline_is_found_by_its_name() -> None:
    names = pipeline_names()
    assert {"flights", "word_count"} <= set(names)
    assert names == sorted(names) == [pipeline.name for pipeline in all_pipelines().pipelines]
    assert all(find_pipeline(name) is pipeline for name, pipeline in zip(names, all_pipelines().pipelines, strict=True))


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
# A module, and what is said of it: the beginning, and, below the folder, the end.
MODULES = {
    "ends": ("\nimport os\nos._exit(3)", "SettingsInvalid: tidegate.jobs.pipelines.ends ends the process", "ends.py, line 3)"),
    "fails": ("\n\n1 / 0", "ZeroDivisionError: division by zero", "fails.py, line 3)"),
    "leaves": ("import asyncio\nraise asyncio.CancelledError", "SettingsInvalid: ", "leaves.py, line 2)"),
    "misnamed": (
        DECLARATION.format(name="Mis-named"),
        "ValueError: 'Mis-named_state' cannot be the name of a",
        "misnamed.py, line 3)",
    ),
    "nul": ("\0", "", ")"),
    "parses_not": ("\ndef f(:", "SyntaxError: ", "parses_not.py, line 2)"),
    "says_nothing": (
        "class E(Exception):\n    def __str__(self):\n        raise SystemExit\nraise E",
        "E (its text cannot be made: SystemExit)",
        "says_nothing.py, line 4)",
    ),
    "stops": ("raise GeneratorExit", "SettingsInvalid: ", "stops.py, line 1)"),
}


def test_whatever_a_module_writes_or_raises_the_others_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "pipelines"
    folder.mkdir()
    (folder / "loud.py").write_text(LOUD + DECLARATION.format(name="loud"))
    for name, (code, *_) in MODULES.items():
        (folder / f"{name}.py").write_text(code)
    environment = {"PATH": "/usr/bin:/bin", HOME_VARIABLE: str(tmp_path)}
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


def test_a_thread_of_an_authors_code_ends_no_process_as_a_success() -> None:
    """Airflow would show a batch as processed, and as committed, whose tasks ended so. A child that it forks may end."""
    done = subprocess.run([sys.executable, "-c", IN_A_THREAD], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (1, "A thread of an author's code has ended this process by os._exit(0).\n")


def test_what_can_be_no_rebuilds_name_costs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page asks for each pipeline that waits, every two seconds; a search reads all packages that are installed."""
    searches: list[str] = []
    monkeypatch.setattr(registry, "_entry_point", searches.append)

    assert [named_rebuild(name) for name in ("flights", "no_code_declares_it")] == [None, None]
    assert searches == []


@pytest.mark.parametrize("name", ["zzz", "tidegate.jobs.pipelines.flights", "Flights"])
def test_an_unknown_name_gets_a_suggestion_or_the_list(name: str) -> None:
    with pytest.raises(UnknownPipeline) as refusal:
        find_pipeline(name)
    near = "Did you mean flights? " if name == "Flights" else ""
    assert str(refusal.value) == f"There is no pipeline {name}. {near}Pipelines: {', '.join(pipeline_names())}."


def test_a_pipeline_of_another_package_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_package.py").write_text(DECLARATION.format(name="theirs"))
    metadata = tmp_path / "their_package-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\ntheirs = their_package:PIPELINE\n")
    assert not has_pipeline("theirs")
    monkeypatch.syspath_prepend(tmp_path)
    assert "theirs" in entry_points(group=ENTRY_POINTS).names

    found = find_pipeline("theirs")  # installed since the last search
    assert has_pipeline("theirs")
    assert "theirs" in pipeline_names()
    assert isinstance(found, Pipeline)
    assert found.name == "theirs"
