"""A database that was restored: every verb that an operator looks at first says so, before a run fails."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.cli.conftest import CommandLine, check_schema, write_flights
from tests.servers import Server

ROWS = ("2013,1,1,517,2,UA,1545,EWR,IAH,1400", "2013,1,1,533,-4,UA,1714,LGA,IAH,1416")
STORY = "This database was restored, promoted or copied: commits of flights after txid 1 may be lost."


@pytest.fixture
def restored(tidegate: CommandLine, server: Server) -> Iterator[CommandLine]:
    """The command line on a copy of its database, as `tidegate restore` leaves it."""
    write_flights(tidegate.settings.home, 1, *ROWS)
    assert tidegate.json("run", "flights")["committed"] == [1]
    name = server.create_database(tidegate.settings.pg_database)
    yield CommandLine(replace(tidegate.settings, pg_database=name), tidegate.environment)
    server.drop_database(name)


@pytest.mark.soak
def test_the_loss_is_named_with_what_to_do_and_no_run_starts(restored: CommandLine) -> None:
    status = restored.json("status")
    assert status["losses"] == {"flights": STORY}
    shown = restored("status")
    assert "a person, as commits may be missing" in shown.stdout
    assert f"{STORY} It is halted until a person decides: tidegate error HOLE_DETECTED" in shown.stderr
    missing = restored("doctor", "--component", "command-line", "--json")
    found = json.loads(missing.stdout)
    check_schema("doctor", found)
    assert f"{STORY} See: tidegate error HOLE_DETECTED" in [each["problem"] for each in found["missing"]]

    for arguments in (  # although Airflow is not even there: the message is the ledger's
        ("trigger", "flights"),
        ("backfill", "flights", "--from-txid", "1", "--to-txid", "2"),
        ("retry", "flights"),
        ("run", "flights"),
    ):
        refusal = restored.refused(*arguments, exit_code=1)
        assert "flights: this database was restored, promoted or copied" in refusal
        assert refusal.endswith("More: tidegate error HOLE_DETECTED\n")

    write_flights(restored.settings.home, 1, *ROWS[:1])  # the source has failed over, too: accepting is half of what is to do
    accepted = restored("migrate", "--accept-epoch")
    rest = "flights: batches that are open go on, and the next plan is refused. "
    assert (accepted.returncode, rest in accepted.stderr, "has changed since it counted" in accepted.stderr) == (0, True, True)
    assert restored.json("status")["losses"] == {}
    assert "Ledger:" not in restored("doctor", "--component", "command-line").stdout
    assert rest in restored("retry", "flights", "--reason", "a test").stderr
    assert restored.json("why", "flights")["causes"][0]["error"] == "SOURCE_CHANGED"
