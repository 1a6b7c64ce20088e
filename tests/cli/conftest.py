"""The command line in processes of its own, against the test's database."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

from jobs.pipelines import flights
from state_store import Settings
from tests.conftest import COMMAND


@dataclass
class CommandLine:
    """Runs `tidegate` with the given settings, and says how it ended."""

    settings: Settings
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run one command; keyword arguments are environment variables."""
        names = Settings.environment_names()
        values = {names[f.name]: str(value) for f in fields(Settings) if (value := getattr(self.settings, f.name)) is not None}
        environ = {**values, **self.environment, **environment, "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
        return subprocess.run(
            [COMMAND, *arguments], env=environ, cwd=self.settings.home, capture_output=True, text=True, timeout=120, check=False
        )

    def json(self, *arguments: str) -> Any:
        """Run a verb with --json and return what it printed."""
        done = self(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def tidegate(settings: Settings, register: Callable[..., None]) -> CommandLine:
    """The command line on a database where flights is registered and has no batches."""
    register(flights.PIPELINE)
    return CommandLine(settings)


def write_flights(home: Path, day: int, *rows: str) -> Path:
    """Write one daily file of flights."""
    folder = home / "data" / "flights"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"2013-01-{day:02d}.csv"
    header = ",".join(flights.PIPELINE.source.schema)
    file.write_text("".join(f"{line}\n" for line in (header, *rows)), encoding="utf-8")
    return file
