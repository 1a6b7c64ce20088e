"""The command line in this process: what a verb does, prints and exits with, without the seconds of a new interpreter.

What is about processes runs in processes of its own: signals, terminals, shells, traces, and what an import loads.
"""

import gc
import importlib
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

import tidegate.jobs.pipelines
from tests.store import commit_witness, project
from tidegate import cli
from tidegate.jobs import registry
from tidegate.state_store import Settings

PIPELINES = "tidegate.jobs.pipelines"
WITHOUT_PIPELINES = Path(tidegate.jobs.pipelines.__file__).parent
CRASHED = 1


def environment_of(settings: Settings) -> dict[str, str]:
    names = Settings.environment_names()
    return {names[f.name]: str(value) for f in fields(Settings) if (value := getattr(settings, f.name)) is not None}


@contextmanager
def started_with(environment: Mapping[str, str], *, alone: bool = True) -> Iterator[None]:
    """Let this process have an environment, and what a new process makes of it: the project's pipelines, authors' packages.

    The environment is the only one, or, not `alone`, comes on top of the present one.
    """
    folders = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    with mock.patch.dict(os.environ, environment, clear=alone), pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [*folders, *sys.path])
        patched.setattr(sys, "dont_write_bytecode", True)  # a file that is written twice within a second is loaded twice
        patched.setattr(tidegate.jobs.pipelines, "__path__", [str(project.own("pipelines") or WITHOUT_PIPELINES)])
        kept = _forget()
        try:
            yield
        finally:
            _forget()
            for name, module in kept.items():
                sys.modules[name] = module
                setattr(tidegate.jobs.pipelines, name.rpartition(".")[2], module)
    importlib.invalidate_caches()
    registry._entry_points.cache_clear()


def run(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `tidegate` as from a shell in this folder, with this environment alone; its output is piped."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    with started_with(environment), pytest.MonkeyPatch.context() as patched, _own_log_and_garbage():
        patched.chdir(folder)
        patched.setattr(sys, "argv", ["tidegate", *arguments])
        patched.setattr(sys.modules["__main__"], "__package__", None)  # or click would show how the tests were started
        patched.setattr(sys, "excepthook", sys.excepthook)
        patched.setattr(sys, "stdout", stdout)
        patched.setattr(sys, "stderr", stderr)
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        except Exception:  # noqa: BLE001 - as the interpreter does it
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            code = CRASHED
    assert isinstance(code, int)
    return subprocess.CompletedProcess(list(arguments), code, _text(stdout), _text(stderr))


def _text(written: io.TextIOWrapper) -> str:
    written.flush()
    return written.buffer.getvalue().decode()  # type: ignore[attr-defined]


def _forget() -> dict[str, ModuleType]:
    """Forget what this process has found and loaded of pipelines, and which warnings it has given; return the modules."""
    loaded = {name: module for name, module in sys.modules.items() if name.startswith(f"{PIPELINES}.")}
    for name in loaded:
        del sys.modules[name]
    importlib.invalidate_caches()
    for found in (registry._entry_points, project.warn, commit_witness._warn):
        found.cache_clear()
    return loaded


@contextmanager
def _own_log_and_garbage() -> Iterator[None]:
    """Let the log be as in a new process; take back how garbage is collected, which is for a process that ends soon."""
    root, thresholds = logging.getLogger(), gc.get_threshold()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    root.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
