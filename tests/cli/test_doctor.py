"""`tidegate doctor`, beside real servers."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine, check_schema
from tidegate.doctor_checks import COMPONENTS


@pytest.mark.promise("verb:doctor")
def test_each_missing_thing_is_a_line_with_what_to_do(tidegate: CommandLine, tmp_path: Path) -> None:
    done = tidegate("doctor", "--component", "command-line")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert f"Sources: flights: The source folder {tmp_path}/data/flights does not exist. Create it" in done.stdout
    assert {line.split(": ")[0] for line in lines} == {"Sources", "Airflow's API for people"}
    assert done.stderr == f"command-line: {len(lines)} missing.\n"


@pytest.mark.promise("json:doctor")
def test_the_answer_for_programs_is_as_its_schema_says(tidegate: CommandLine) -> None:
    for component in COMPONENTS:
        done = tidegate("doctor", "--component", component, "--json")
        found = json.loads(done.stdout)
        check_schema("doctor", found)
        assert done.returncode == bool(found["missing"])
