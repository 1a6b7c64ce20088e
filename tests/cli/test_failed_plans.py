"""A plan that fails, as the command line shows it until another succeeds."""

from datetime import datetime

import pytest

from tests import command_lines
from tests.cli.conftest import CommandLine


def causes(tidegate: CommandLine) -> list[dict]:
    return tidegate.json("why", "flights")["causes"]


@pytest.mark.promise("fault:plan-fails-its-source-is-away-or:processing")
def test_every_verb_shows_that_plans_fail_until_one_succeeds(tidegate: CommandLine) -> None:
    for _ in range(2):
        assert tidegate("run", "flights").returncode == 1

    missing = tidegate.settings.home / "data" / "flights"
    line = f"SOURCE_UNREADABLE: The source folder {missing} does not exist."
    (found,) = tidegate.json("status")["pipelines"]
    assert found["failed_plans"] == 2
    assert found["plan_error"].startswith(line)
    assert found["waits_for"] is None
    shown = "".join(part.strip() for part in tidegate("status").stdout.splitlines())
    assert "a plan that succeeds: SOURCE_UNREADABLE:" in shown.replace("  ", " ")
    inspected = tidegate("inspect", "flights").stderr
    since = datetime.fromisoformat(found["plans_failing_since"])
    assert f"flights: planning has failed 2 times since {since:%Y-%m-%d %H:%M:%S} UTC: {line}" in inspected
    assert "See: tidegate why flights" in inspected

    (cause,) = causes(tidegate)
    assert (cause["code"], cause["error"], cause["severity"]) == ("PLAN_FAILED", "SOURCE_UNREADABLE", "error")
    assert cause["since"] == found["plans_failing_since"]
    assert line in cause["sentence"]
    lines = tidegate("why", "flights").stdout.splitlines()
    assert lines[2].startswith("  Planning has failed 2 times (run ")
    assert lines[2].endswith(f" Since {since:%Y-%m-%d %H:%M:%S} UTC.")
    assert "    More: tidegate error SOURCE_UNREADABLE" in lines
    for each in lines:
        if each.startswith("    $ "):
            command_lines.check(each.removeprefix("    $ "))

    missing.mkdir(parents=True)
    assert [cause["code"] for cause in causes(tidegate)] == ["PLAN_FAILED"]
    assert tidegate("run", "flights").returncode == 0
    (found,) = tidegate.json("status")["pipelines"]
    assert (found["failed_plans"], found["plans_failing_since"], found["plan_error"]) == (0, None, None)
    assert [cause["code"] for cause in causes(tidegate)] == ["IDLE"]
    assert "plan" not in tidegate("inspect", "flights").stderr.replace("planned", "")
