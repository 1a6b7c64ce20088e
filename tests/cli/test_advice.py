"""Advice is right: tests make a fault, do what `why` and the error's page say, and the state is what plain Python counts."""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CommandLine, write_file
from tests.sources.in_process import stage_here
from tests.statements import execute
from tests.store import HOME_VARIABLE, Attempt
from tidegate.jobs.engine.processing import Processor
from tidegate.state_store import Settings

DECLARATION = """
from tidegate import Count, Files, Pipeline, State, Sum

PIPELINE = Pipeline(
    name="flights",
    source=Files("data/flights", glob="*.csv", format="csv", schema={{"carrier": "string", "cents": "{cents}"}}, max_files=1),
    states={{"daily": State(key={{"carrier": "text"}}, aggregates={{"flights": Count(), "cents": Sum("cents", "{total}")}})}},
    version={version},
    transform={transform},
    tries=1,
    retry_delay_seconds=0,
)
"""
FAILS_FOR_2 = """lambda rows: rows.selectExpr("carrier", "IF(cents = 2, raise_error('two'), cents) AS cents")"""


@dataclass
class Project:
    """A project with the pipeline of the pages' examples, whose commands are typed as they were printed."""

    line: CommandLine
    counting: dict[str, list[str]] = field(default_factory=dict)

    def declare(self, version: int = 1, cents: str = "int", total: str = "integer", transform: str = "None") -> None:
        text = DECLARATION.format(version=version, cents=cents, total=total, transform=transform)
        (self.line.settings.home / "pipelines/flights.py").write_text(text)

    def write(self, name: str, *rows: str) -> Path:
        """Write an input file, which is to count unless the test takes it back."""
        self.counting[name] = list(rows)
        return write_file(self.line.settings.home, f"flights/{name}", "carrier,cents", *rows)

    def type(self, *commands: str, exits: int = 0, **environment: str) -> str:
        for command in commands:
            done = self.line(*shlex.split(command)[1:], **environment)
            assert done.returncode == exits, f"{command}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def fails(self, code: str, exits: int = 1, **environment: str) -> str:
        printed = self.type("tidegate run flights", exits=exits, **environment)
        assert f"More: tidegate error {code}" in printed
        return printed

    def causes(self, pipeline: str = "flights") -> dict[str, dict[str, Any]]:
        return {cause["code"]: cause for cause in self.line.json("why", pipeline)["causes"]}

    def heed(self, code: str, act: Callable[[], object], pipeline: str = "flights") -> None:
        """Do what a cause's advice says, then type its command."""
        cause = self.causes(pipeline)[code]
        assert cause["advice"]
        act()
        self.type(cause["command"])

    def skips(self, pipeline: str = "flights") -> None:
        (command,) = re.findall(r"\((tidegate skip [^)]*)\)", self.causes(pipeline)["HALTED"]["advice"])
        self.type(command)

    def check(self) -> None:
        """Find the state that plain Python makes of all files that count, and nothing that waits."""
        made: dict[str, tuple[int, int]] = {}
        for carrier, cents in (row.split(",") for rows in self.counting.values() for row in rows):
            flights, total = made.get(carrier, (0, 0))
            made[carrier] = (flights + 1, total + int(cents))
        state = self.line.json("inspect", "flights", "--state", "daily")
        assert {row["carrier"]: (row["flights"], int(row["cents"])) for row in state} == made
        assert list(self.causes()) == ["IDLE"]


@pytest.fixture
def project(settings: Settings) -> Project:
    made = Project(CommandLine(settings, {HOME_VARIABLE: str(settings.home)}))
    for folder in ("pipelines", "migrations"):
        (settings.home / folder).mkdir()
    made.declare()
    made.write("a.csv", "UA,1", "AA,2")
    made.type('tidegate migrate --new "flights"', "tidegate migrate", "tidegate run flights")
    return made


@pytest.fixture
def _counted_here(monkeypatch: pytest.MonkeyPatch, stack: Settings) -> None:
    """Let batches be counted in this process, but those that go to a Spark that is not there."""
    in_spark = Processor._stage

    def stage(processor: Processor, attempt: Attempt) -> None:
        (stage_here if processor._store.settings.spark_remote == stack.spark_remote else in_spark)(processor, attempt)

    monkeypatch.setattr(Processor, "_stage", stage)


@pytest.mark.promise("verb:why", "error:TRANSFORM_FAILED")
def test_content_that_fails_is_corrected_or_given_up_also_in_a_rebuild(project: Project) -> None:
    project.declare(2, cents="smallint")
    project.type("tidegate migrate")
    project.write("b.csv", "UA,1", "AA,40000")
    project.fails("MALFORMED_RECORD")
    project.heed("HALTED", lambda: (project.declare(3), project.type("tidegate migrate")))
    project.check()
    project.write("c.csv", "AA,x")
    project.fails("MALFORMED_RECORD")
    project.skips()
    project.counting["c.csv"] = []
    project.check()
    project.declare(4, total="bigint", transform=FAILS_FOR_2)
    project.type("tidegate rebuild flights --yes", exits=1)
    project.heed("HALTED", lambda: project.declare(4, total="bigint"), "flights__v4")
    project.type('tidegate migrate --new "wider"', "tidegate migrate")
    project.check()


@pytest.mark.promise("verb:rebuild", "json:rebuild")
@pytest.mark.usefixtures("_counted_here")
def test_a_changed_aggregate_counts_from_the_first_batch_on(project: Project) -> None:
    line = project.line
    project.declare(total="bigint")
    refused = line.refused("migrate", "--new", "wider", exit_code=1)
    assert "Let them be computed again: raise its version, and run: tidegate rebuild flights --yes." in refused
    assert "flights cannot be rebuilt: first raise its version above 1" in line.refused("rebuild", "flights", exit_code=1)
    project.declare(2, total="bigint")
    assert "would be computed again for version 2, as pipeline flights__v2." in line.refused("rebuild", "flights")
    project.write("b.csv", f"UA,{2**31 - 1}", "UA,1")
    done = line.json("rebuild", "flights", "--yes")
    assert done == {"pipeline": "flights", "rebuild": "flights__v2", "committed": 1, "rebuilt": 1}
    project.type('tidegate migrate --new "wider"', "tidegate migrate", "tidegate run flights")
    project.check()
    assert "Retired: flights__v2" in line("status").stderr
    (retired,) = project.causes("flights__v2").values()
    assert (retired["advice"], retired["command"]) == (
        "Nothing. For another rebuild, raise the version of flights above 2.",
        None,
    )


@pytest.mark.promise("verb:why", "error:SOURCE_CHANGED")
@pytest.mark.usefixtures("_counted_here")
def test_a_source_that_has_changed_is_put_back_or_counts_as_it_is(project: Project) -> None:
    first = project.line.settings.home / "data/flights/a.csv"
    kept = first.read_text()
    first.write_text(f"{kept}UA,9\n")
    project.fails("SOURCE_CHANGED")
    project.heed("PLAN_FAILED", lambda: first.write_text(kept))
    project.check()
    for name in ("b.csv", "c.csv"):
        file = project.write(name, "UA,7")
        project.fails("SPARK_UNAVAILABLE", exits=75, TIDEGATE_SPARK_REMOTE="sc://127.0.0.1:1")
        file.write_text("carrier,cents\nUA,8\n")
        project.fails("SOURCE_CHANGED")
        if name == "b.csv":
            project.heed("HALTED", lambda file=file: file.write_text("carrier,cents\nUA,7\n"))  # type: ignore[misc]
        else:
            project.skips()
            project.type("tidegate run flights")
            project.counting[name] = ["UA,8"]
        project.check()


@pytest.mark.promise("verb:why", "error:HOLE_DETECTED", "error:GUARD_MISMATCH")
@pytest.mark.usefixtures("_counted_here")
def test_a_ledger_that_was_restored_and_a_state_that_was_written_by_hand(project: Project, settings: Settings) -> None:
    owner = settings.conninfo(user=settings.pg_owner)
    execute(owner, "UPDATE tidegate.cursor SET epoch = '1/2/3'")
    project.write("b.csv", "UA,7")
    project.fails("HOLE_DETECTED")
    page = project.line("error", "HOLE_DETECTED").stdout
    project.type(*re.findall(r"^ +\$ (tidegate .*)", page, re.MULTILINE))
    project.check()

    page = project.line("error", "GUARD_MISMATCH").stdout
    (setting,) = re.findall(r"`(SET tidegate\.writer = '\w+')`", page)
    (select,) = re.findall(r"`(SELECT [^`]*)`", page)

    def write(change: str) -> None:
        execute(owner, f"{setting}; UPDATE state.daily SET {change} WHERE carrier = 'UA'")

    write("txid = 99")
    project.write("c.csv", "UA,7")
    project.fails("GUARD_MISMATCH")
    assert [row[0] for row in execute(owner, select)] == ["UA"]
    project.heed("HALTED", lambda: write("txid = 2"))
    project.check()
