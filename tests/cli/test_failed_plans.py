"""A plan that fails, as the command line shows it until another succeeds."""

import pytest

from tests.cli.conftest import CommandLine


@pytest.mark.promise("fault:plan-fails-its-source-is-away-or:processing")
def test_status_and_inspect_show_that_plans_fail_until_one_succeeds(tidegate: CommandLine) -> None:
    for _ in range(2):
        assert tidegate("run", "flights").returncode == 1
    missing = tidegate.settings.home / "data" / "flights"
    line = f"SOURCE_UNREADABLE: The source folder {missing} does not exist."
    (found,) = tidegate.json("status")["pipelines"]
    assert (found["failed_plans"], found["waits_for"], found["plan_error"].startswith(line)) == (2, None, True)
    shown = "".join(part.strip() for part in tidegate("status").stdout.splitlines())
    assert "a plan that succeeds: SOURCE_UNREADABLE:" in shown.replace("  ", " ")
    inspected = tidegate("inspect", "flights").stderr
    assert "flights: planning has failed 2 times since " in inspected
    assert f" UTC: {line}" in inspected
    (cause,) = tidegate.json("why", "flights")["causes"]
    assert (cause["code"], cause["since"]) == ("PLAN_FAILED", found["plans_failing_since"])

    missing.mkdir(parents=True)
    assert tidegate("run", "flights").returncode == 0
    (found,) = tidegate.json("status")["pipelines"]
    assert (found["failed_plans"], found["plans_failing_since"], found["plan_error"]) == (0, None, None)
