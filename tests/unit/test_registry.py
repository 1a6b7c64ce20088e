"""Pipelines are found by name, and a wrong name gets a useful answer."""

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import COMMAND
from tests.store import HOME_VARIABLE

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
    done = subprocess.run([sys.executable, "-c", IN_A_THREAD], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (1, "A thread of an author's code has ended this process by os._exit(0).\n")
