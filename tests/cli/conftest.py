"""The command line, against the test's database."""

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests import in_process
from tests.checkout import REPOSITORY, write_package
from tests.cli import shop
from tests.conftest import create_states
from tests.examples import copy_examples
from tests.store import project
from tidegate.jobs.pipelines import flights, word_count
from tidegate.state_store import Settings

GOOD = "2013,1,1,517,2,UA,1545,EWR,IAH,1400"  # a line of flights
# By verb, such as `quarantine list`, the schema of what it prints with --json.
SCHEMAS = {f.stem.replace("-", " "): json.loads(f.read_text()) for f in sorted((REPOSITORY / "docs/json").glob("*.json"))}


@dataclass
class CommandLine:
    settings: Settings
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run one command in this process; keyword arguments are environment variables."""
        usual = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
        whole = {**in_process.environment_of(self.settings), **self.environment, **environment, **usual}
        return in_process.run(arguments, whole, self.settings.home)

    def refused(self, *arguments: str, exit_code: int = 2, **environment: str) -> str:
        done = self(*arguments, **environment)
        assert (done.returncode, done.stdout) == (exit_code, ""), done.stderr
        return done.stderr

    def airflow_away(self) -> dict[str, str]:
        (password := self.settings.home / "password").write_text("secret")
        return {"TIDEGATE_AIRFLOW_URL": "http://127.0.0.1:1", "TIDEGATE_AIRFLOW_PASSWORD_FILE": str(password)}

    def json(self, *arguments: str) -> Any:
        """Run a verb with --json and return its output, which has to be as its schema says."""
        done = self(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        check_schema(verb_of(arguments), found)
        return found


def verb_of(arguments: Sequence[str]) -> str:
    return next(" ".join(arguments[:n]) for n in (2, 1) if " ".join(arguments[:n]) in SCHEMAS)


def check_schema(verb: str, found: Any) -> None:
    """Compare a verb's output with its schema; a field that the schema does not describe is an error here."""
    jsonschema.Draft202012Validator(strict(SCHEMAS[verb])).validate(found)


def strict(schema: Any) -> Any:
    """Return a schema that allows the described fields only; users' schemas allow those that later versions add."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: strict(part) for name, part in schema.items()}
    return {"additionalProperties": False, **parts} if "properties" in schema and schema.get("type") == "object" else parts


@pytest.fixture
def tidegate(settings: Settings, register: Callable[..., None]) -> CommandLine:
    """The command line in a project with the pipelines of the examples, of which flights is registered and has no batches."""
    copy_examples(settings.home, "pipelines")
    create_states(settings, flights.PIPELINE, word_count.PIPELINE)
    register(flights.PIPELINE)
    return CommandLine(settings, {project.HOME_VARIABLE: str(settings.home)})


@pytest.fixture
def shops(tidegate: CommandLine, register: Callable[..., None]) -> CommandLine:
    """The command line with another package that provides the pipelines of `tests.cli.shop`, registered too."""
    register(shop.ORDERS, shop.VISITS)
    authors = write_package(tidegate.settings.home / "authors", orders="tests.cli.shop:ORDERS", visits="tests.cli.shop:VISITS")
    tidegate.environment["PYTHONPATH"] = f"{authors}:{REPOSITORY}"
    return tidegate


def write_file(home: Path, name: str, *lines: str) -> Path:
    file = home / "data" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def write_flights(home: Path, day: int, *rows: str) -> Path:
    return write_file(home, f"flights/2013-01-{day:02d}.csv", ",".join(flights.PIPELINE.source.schema), *rows)
