"""Advice as the command line prints it: which there is, and a project in which tests do what it says, typed as printed."""

import ast
import json
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.checkout import REPOSITORY
from tests.cli.conftest import CommandLine
from tests.store import HOME_VARIABLE
from tidegate.explain import error_pages, remedies
from tidegate.state_store import Settings

DONE = 0
STEP = re.compile(r"\n(?=\d+\. )")
COMMAND = re.compile(r"`(tidegate [a-z][^`]*)`|^ +(?:\$ )?(tidegate [a-z].*)$", re.MULTILINE)
CAUSE = re.compile(r"^  (?:Because: |Besides: )?(?=\S)", re.MULTILINE)
SAMPLE_TXID = re.compile(r"(?<=flights )7\b|(?<=--txid )7\b")  # the batch of the examples in docs/errors
EXPLAINS = REPOSITORY / "tidegate/explain"
# How the sources of `why` make a cause, and what gives it an advice.
CALLS = ("cause", "_of")
GIVES = {"advice", "command", "run", "retry", "starts_a_run"}
# The pipeline of the pages' examples, small.
DECLARATION = """
from tidegate import Check, Count, Files, Pipeline, State, Sum

PIPELINE = Pipeline(
    name="flights",
    source=Files("data/flights", glob="{glob}", format="csv", schema={schema}, max_files=1{source}),
    states={{"daily": State(key={{"carrier": "text"}}, aggregates={{"flights": Count(), "cents": {cents}}}{state})}},
    version={version},
    tries=1,
    retry_delay_seconds=0,
    {more}
)
"""
USUAL = {
    "schema": '{"carrier": "string", "cents": "int"}',
    "cents": 'Sum("cents", "integer")',
    "state": "",
    "more": "",
    "source": "",
    "glob": "*.csv",
}


# What the others take.
NOT_FOLLOWED = {
    "a stack of its own (tests/stack, tests/end_to_end)": (
        "AIRFLOW_UNAVAILABLE.1, HOLE_DETECTED.2, NOT_PERMITTED.1, NOT_PERMITTED.2, NOT_PERMITTED.3, NOT_PERMITTED.4, "
        "SCHEMA_OUT_OF_DATE.3, STACK_UNAVAILABLE.1, STACK_UNAVAILABLE.2, STACK_UNAVAILABLE.3, STORE_UNAVAILABLE.1"
    ),
    "Airflow": (
        "UNKNOWN_PIPELINE.3, why DAG_PAUSED, why POOL_FULL, why POOL_MISSING, why RUN_ACTIVE, why SCHEDULER_SLOW, "
        "why RUN_REFUSED, why TRIGGERER_AWAY, why TRIGGERER_FULL"
    ),
    "Kafka or a lake of tables": (
        "PARTITION_UNAVAILABLE.1, PARTITION_UNAVAILABLE.3, RANGE_EXPIRED.2, RANGE_EXPIRED.4, RANGE_EXPIRED.5, SOURCE_CHANGED.5"
    ),
    "a machine that is full, hangs, or is another one": (
        "ATTEMPT_TIMED_OUT.3, EXECUTORS_UNPREPARED.1, MACHINE_REFUSES.1, MACHINE_REFUSES.2, MACHINE_REFUSES.3, "
        "LISTENER_NOT_TRUSTED.3, SPARK_FAILED.2, STORE_UNAVAILABLE.4"
    ),
    "other pipelines or code than a page's example": (
        "HOLE_DETECTED.3, LOCK_HELD.3, METADATA_CORRUPT.2, RANGE_REFUSED.4, RANGE_REFUSED.5, SCHEMA_OUT_OF_DATE.6, "
        "SOURCE_CHANGED.4, SPARK_FAILED.3, UNPROCESSED.4"
    ),
}


def steps_of(page: str) -> list[str]:
    body = page.partition("What to do\n")[2].partition("\nRelated: ")[0]
    return [step for step in STEP.split(f"\n{body.strip()}") if step.strip()]


def advices() -> dict[str, str]:
    found = {
        f"{code}.{number}": step
        for code in error_pages.codes()
        for number, step in enumerate(steps_of(error_pages.plain(code)), start=1)
    }
    found |= {f"why {code}": "" for code in _causes_with_advice()}
    found |= {f"fix {code}": sentence for code, sentence in remedies._FIXES.items()}
    return found | {f"fix of a plan {code}": sentence for code, sentence in remedies._FIXES_OF_PLANS.items()}


def _causes_with_advice() -> set[str]:
    """Return the codes of causes that give an advice or a command, as the sources of `why` name them."""
    found = set()
    for file in ("airflow_report.py", "batch_causes.py", "why.py"):
        for node in ast.walk(ast.parse((EXPLAINS / file).read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in CALLS:
                continue
            gives = {keyword.arg or ast.unparse(keyword.value).partition("(")[0] for keyword in node.keywords} & GIVES
            codes = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and str(arg.value).isupper()]
            found.update(codes if gives else [])
    return found


@dataclass
class Followed:
    times: Counter[str] = field(default_factory=Counter)

    def report(self) -> tuple[float, str]:
        known = set(advices())
        others = known - self.times.keys()
        part = 1 - len(others) / len(known)
        lines = [f"{len(known)} advices, {len(known) - len(others)} followed ({part:.0%}). Not, as it takes:"]
        for reason, names in NOT_FOLLOWED.items():
            lines.append(f"- {reason}: {names}")
        wrong = others ^ {name for names in NOT_FOLLOWED.values() for name in names.split(", ")}
        return part, "\n".join([*lines, *(f"This list is wrong about {name}." for name in sorted(wrong))])


@dataclass(frozen=True)
class Answer:
    code: str
    text: str
    advice: str
    commands: tuple[str, ...]
    error: str | None


@dataclass
class Project:
    """A project with the pipeline of the pages' examples, whose commands are typed as they were printed.

    A test that has let it go on, or `end`, leaves it to the next one, which has names of files of its own.
    """

    line: CommandLine
    followed: Followed
    rows: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    printed: str = ""
    typed: list[str] = field(default_factory=list)
    version: int = 0
    tests: int = 0
    parts: dict[str, str] = field(default_factory=dict)
    has_ended: bool = False

    @classmethod
    def made(cls, settings: Settings, followed: Followed) -> "Project":
        project = cls(CommandLine(settings, {HOME_VARIABLE: str(settings.home)}), followed)
        project.declare()
        (project.home / "migrations").mkdir()
        project.type('tidegate migrate --new "flights"')
        project.type("tidegate migrate")
        project.write("a.csv", "UA,1", "AA,2")
        project.type("tidegate run flights")
        return project

    def begin(self) -> None:
        self.tests += 1
        self.has_ended = False
        if self.parts:
            self.declare()
            self.type("tidegate migrate")
        self.typed.clear()

    @property
    def home(self) -> Path:
        return self.line.settings.home

    @property
    def folder(self) -> Path:
        return self.home / "data/flights"

    def newest(self) -> int:
        return len(self.line.json("inspect", "flights"))

    def file(self, name: str) -> Path:
        return self.folder / f"{self.tests:02d}{name}"

    def declare(self, **parts: str) -> None:
        self.version += "version" not in parts
        self.parts = {name: part for name, part in parts.items() if name != "version"}
        (self.home / "pipelines").mkdir(exist_ok=True)
        (self.home / "pipelines/flights.py").write_text(DECLARATION.format(**{**USUAL, "version": str(self.version), **parts}))

    def write(self, name: str, *rows: str, header: str = "carrier,cents", counts: bool = True) -> Path:
        """Write an input file, which is to count unless it will be given up."""
        file = self.file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([header, *rows, ""]))
        if counts:
            self.counts(name, *rows)
        return file

    def counts(self, name: str, *rows: str) -> None:
        """Expect that these rows of a file count; none: that it is given up."""
        self.rows[self.file(name).name] = [tuple(row.split(",")) for row in rows]  # type: ignore[misc]

    def type(self, command: str, *, exits: int = DONE, **environment: str) -> subprocess.CompletedProcess[str]:
        done = self.line(*shlex.split(command)[1:], **environment)
        self.printed = done.stdout + done.stderr
        self.typed.append(command)
        assert done.returncode == exits, f"{command}: {done.returncode}: {self.printed}"
        return done

    def fails(self, command: str, code: str, *, exits: int = 1, **environment: str) -> str:
        self.type(command, exits=exits, **environment)
        assert f"More: tidegate error {code}" in self.printed, f"{command}: {self.printed}"
        return self.printed

    def why(self, code: str, *, txid: int | None = None, pipeline: str = "flights", **environment: str) -> Answer:
        words = f"tidegate why {pipeline}" if txid is None else f"tidegate why {pipeline} {txid}"
        self.type(words, **environment)
        printed = self.printed
        codes = [cause["code"] for cause in self._causes(words, environment)]
        blocks = CAUSE.split(printed.partition("\n")[2])[1:]
        assert code in codes, f"{codes}: {printed}"
        assert len(blocks) == len(codes), printed
        text = blocks[codes.index(code)]
        lines = [line.strip() for line in text.splitlines()]
        advice = " ".join(line.removeprefix("What to do: ") for line in lines if line.startswith("What to do: "))
        commands = tuple(line.removeprefix("$ ") for line in lines if line.startswith("$ "))
        more = [line.rpartition(" ")[2] for line in lines if line.startswith("More: ")]
        return Answer(code, text, advice, commands, more[0] if more else None)

    def _causes(self, words: str, environment: Mapping[str, str]) -> list[dict[str, Any]]:
        return json.loads(self.line(*shlex.split(words)[1:], "--json", **environment).stdout)["causes"]

    def heed(
        self,
        cause: Answer,
        *,
        act: Callable[[], object] | None = None,
        also: str = "",
        skips: bool = False,
        exits: int = DONE,
        **environment: str,
    ) -> None:
        """Do what a cause's advice says: an act, and the command that its sentence has, then its command as it was printed.

        If the test `skips` the batch, only the command that gives it up.
        """
        if act is not None:
            assert cause.advice
            act()
        if also:
            assert f"({also})" in cause.advice, cause.advice
            self.type(also, **environment)
        for command in re.findall(r"\((tidegate skip [^)]*)\)", cause.advice) if skips else cause.commands:
            self.type(command, exits=exits, **environment)
        self.followed.times[f"why {cause.code}"] += 1
        for kind, sentences in (("fix", remedies._FIXES), ("fix of a plan", remedies._FIXES_OF_PLANS)):
            begin = sentences.get(cause.error or "", "nothing").removesuffix(".")
            if begin in cause.advice:
                self.followed.times[f"{kind} {cause.error}"] += 1

    def follow(
        self,
        code: str,
        words: str,
        *,
        txid: int = 7,
        act: Callable[[], object] | None = None,
        only: str = "",
        leave: str = "no command",
        done: bool = False,
        **environment: str,
    ) -> str:
        """Follow the one step of an error's page that has these words: an act, then its commands; return what they print.

        Of several ways in one step, those `only` are typed that have this text; those that have another are `leave` out. A
        step whose commands the test has typed before, in this situation, is `done`.
        """
        page = self.line("error", code).stdout
        found = {number: step for number, step in enumerate(steps_of(page), start=1) if words in " ".join(step.split())}
        assert len(found) == 1, f"{code} has {len(found)} steps with {words!r}:\n{page}"
        ((number, step),) = found.items()
        if act is not None:
            act()
        printed = ""
        for inline, shown in COMMAND.findall(step):
            command = SAMPLE_TXID.sub(str(txid), inline or shown)
            if done:
                assert command in self.typed, f"{command} is not among {self.typed}"
            elif only in command and leave not in command:
                self.type(command, **environment)
                printed += self.printed
        self.followed.times[f"{code}.{number}"] += 1
        return printed

    def state(self) -> dict[str, tuple[int, int]]:
        found = self.line.json("inspect", "flights", "--state", "daily")
        return {row["carrier"]: (row["flights"], int(row["cents"])) for row in found}

    def clean(self) -> dict[str, tuple[int, int]]:
        made: dict[str, tuple[int, int]] = {}
        for carrier, cents in (row for rows in self.rows.values() for row in rows):
            flights, total = made.get(carrier, (0, 0))
            made[carrier] = (flights + 1, total + int(float(cents)))
        return made

    def goes_on(self) -> None:
        self.write("z.csv", "AA,5")
        self.type("tidegate run flights")
        self.end()

    def end(self) -> None:
        """Find the state that plain Python makes of all files that count, and nothing that waits."""
        assert self.state() == self.clean()
        assert [cause["code"] for cause in self._causes("tidegate why flights", {})] == ["IDLE"]
        self.has_ended = True
