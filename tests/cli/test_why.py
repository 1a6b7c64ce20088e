"""`tidegate why` and `tidegate error`: readable, safe in a terminal, and useful when the ledger cannot be read."""

import json

import pytest

from tests import command_lines
from tests.batches import Batches
from tests.cli.conftest import CommandLine, write_flights
from tests.statements import execute
from tidegate.explain import error_pages
from tidegate.jobs.pipelines import flights
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import StateStore

GOOD = "2013,1,1,517,2,UA,1545,EWR,IAH,1400"
BAD = "2013,1,1,\x1b[31mnoon<b>,2,UA,1545,EWR,IAH,1400"


@pytest.mark.promise("verb:why", "json:why")
def test_a_halted_pipeline_is_explained_with_commands_to_copy(tidegate: CommandLine) -> None:
    home = tidegate.settings.home
    write_flights(home, 1, BAD)
    assert tidegate("run", "flights").returncode == 1
    write_flights(home, 2, GOOD)
    assert tidegate("run", "flights").returncode == 1

    done = tidegate("why", "flights", "2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "flights 2:"
    causes = [line for line in lines if line.startswith("  ") and not line.startswith("   ")]
    assert causes[-1].startswith("  Because: Txid 1 waits for a person: MALFORMED_RECORD: ")
    assert causes[-1].endswith(" UTC.")
    assert "\x1b" not in done.stdout
    assert "\\x1b[31mnoon<b>" in done.stdout
    assert "    $ tidegate retry flights 1" in lines
    assert "    More: tidegate error MALFORMED_RECORD" in lines
    for line in lines:
        if line.startswith("    $ "):
            command_lines.check(line.removeprefix("    $ "))

    halted = tidegate.json("why", "flights")["causes"][-1]
    assert (halted["code"], halted["error"], halted["action"]) == ("HALTED", "MALFORMED_RECORD", {"verb": "retry", "txid": 1})
    assert sorted(halted) == sorted(["code", "sentence", "txid", "since", "advice", "command", "action", "severity", "error"])


def test_airflow_is_asked_also_if_something_else_needs_attention(tidegate: CommandLine) -> None:
    (password := tidegate.settings.home / "password").write_text("secret")
    away = {"TIDEGATE_AIRFLOW_URL": "http://127.0.0.1:1", "TIDEGATE_AIRFLOW_PASSWORD_FILE": str(password)}

    def codes(*txid: str) -> list[str]:
        return [cause["code"] for cause in json.loads(tidegate("why", "flights", *txid, "--json", **away).stdout)["causes"]]

    write_flights(tidegate.settings.home, 1, GOOD)
    assert tidegate("run", "flights").returncode == 0
    record = "INSERT INTO tidegate.quarantine VALUES ('flights', 1, 1, 'bad', 'a.csv:1', 'x', true)"
    execute(tidegate.settings.conninfo(user=tidegate.settings.pg_owner), record)
    assert codes() == ["IDLE", "QUARANTINED"]
    write_flights(tidegate.settings.home, 2, GOOD)
    assert codes() == ["UNREAD", "QUARANTINED", "AIRFLOW_UNKNOWN"]
    with StateStore.connect(tidegate.settings) as store:
        batches = Batches(store, flights.PIPELINE)
        batches.plan("a run", 1)
        batches.seal(2)
    # At first it may wait for others, to be merged with them.
    assert wait_until(lambda: codes("2") == ["WAITS_FOR_COMMIT", "AIRFLOW_UNKNOWN"], 100)


@pytest.mark.promise("verb:error", "json:error")
def test_errors_are_listed_and_explained(tidegate: CommandLine) -> None:
    listed = tidegate("error").stdout
    assert all(code in listed for code in error_pages.codes())
    assert tidegate.json("error") == {code: error_pages.summary(code) for code in error_pages.codes()}
    through_airflow = error_pages.plain("SOURCE_CHANGED")
    assert "tidegate trigger flights --wait" in through_airflow
    without = through_airflow.replace("tidegate trigger flights --wait", "tidegate run flights")
    assert tidegate("error", "source_changed").stdout == without
    assert tidegate.json("error", "SOURCE_CHANGED") == {"page": error_pages.markdown("SOURCE_CHANGED")}
