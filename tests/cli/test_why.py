"""What is wrong is said: by `why`, `error`, `doctor`, and by `inspect` and `status` of batches and plans that have failed."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests import command_lines
from tests.batches import Batches
from tests.cli.conftest import GOOD, CommandLine, check_schema, write_flights
from tests.servers import Server
from tests.statements import execute
from tidegate.doctor_checks import COMPONENTS
from tidegate.explain import error_pages
from tidegate.jobs.pipelines import flights
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import StateStore

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
    *_, cause = [line for line in lines if re.match("  [^ ]", line)]
    assert re.fullmatch("  Because: Txid 1 waits for a person: MALFORMED_RECORD: .* UTC.", cause)
    assert "\x1b" not in done.stdout
    assert "\\x1b[31mnoon<b>" in done.stdout
    assert {"    $ tidegate retry flights 1", "    More: tidegate error MALFORMED_RECORD"} <= set(lines)
    for command in re.findall("^    [$] (.*)", done.stdout, re.MULTILINE):
        command_lines.check(command)

    halted = tidegate.json("why", "flights")["causes"][-1]
    assert (halted["code"], halted["error"], halted["action"]) == ("HALTED", "MALFORMED_RECORD", {"verb": "retry", "txid": 1})
    assert " ".join(halted) == "code sentence txid since advice command action severity error is_beside"


def test_airflow_is_asked_also_if_something_else_needs_attention(tidegate: CommandLine, store: StateStore) -> None:
    def codes(*txid: str) -> list[str]:
        shown = tidegate("why", "flights", *txid, "--json", **tidegate.airflow_away()).stdout
        return [cause["code"] for cause in json.loads(shown)["causes"]]

    write_flights(tidegate.settings.home, 1, GOOD)
    assert tidegate("run", "flights").returncode == 0
    record = "INSERT INTO tidegate.quarantine VALUES ('flights', 1, 1, 'bad', 'a.csv:1', 'x', true)"
    execute(tidegate.settings.conninfo(user=tidegate.settings.pg_owner), record)
    assert codes() == ["IDLE", "QUARANTINED"]
    assert [cause["is_beside"] for cause in tidegate.json("why", "flights")["causes"]] == [False, True]
    write_flights(tidegate.settings.home, 2, GOOD)
    assert codes() == ["UNREAD", "QUARANTINED", "AIRFLOW_UNKNOWN"]
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
    assert re.search(f"flights: planning has failed 2 times since .* UTC: {line}", tidegate("inspect", "flights").stderr)
    (cause,) = tidegate.json("why", "flights")["causes"]
    assert (cause["code"], cause["since"]) == ("PLAN_FAILED", found["plans_failing_since"])
    missing.mkdir(parents=True)
    assert tidegate("run", "flights").returncode == 0
    (found,) = tidegate.json("status")["pipelines"]
    assert (found["failed_plans"], found["plans_failing_since"], found["plan_error"]) == (0, None, None)


@pytest.mark.promise("verb:doctor", "json:doctor")
def test_each_missing_thing_is_a_line_with_what_to_do(tidegate: CommandLine) -> None:
    done = tidegate("doctor", "--component", "command-line")
    lines = done.stdout.splitlines()
    folder = tidegate.settings.home / "data/flights"
    assert f"Sources: flights: The source folder {folder} does not exist. Create it" in done.stdout
    assert {line.split(": ")[0] for line in lines} == {"Sources", "Airflow's API for people"}
    assert (done.returncode, done.stderr) == (1, f"command-line: {len(lines)} missing.\n")
    for component in COMPONENTS:
        done = tidegate("doctor", "--component", component, "--json")
        check_schema("doctor", found := json.loads(done.stdout))
        assert done.returncode == bool(found["missing"])


# By conditions, the txids that `inspect` chooses.
CHOSEN = {
    (): [1, 2, 3, 4, 5, 6],
    ("--phase", "failed"): [3],
    ("--error", "SOURCE_CHANGED"): [4],
    ("--from-txid", "2", "--to-txid", "4"): [2, 3, 4],
    ("--from-txid", "2", "--phase", "committed", "--since", "3d"): [2],
    ("--limit", "2"): [5, 6],
}


@pytest.mark.promise("verb:inspect", "json:inspect")
def test_conditions_choose_batches(tidegate: CommandLine, store: StateStore) -> None:
    """Txids 1-2 have committed, 3 has failed, 4 is halted, 5-6 are planned."""
    batches = Batches(store, flights.PIPELINE)
    batches.plan("run", 6)
    for txid in (1, 2):
        batches.seal(txid)
        batches.commit(txid)
    for txid in (3, 4):
        store.fail_attempt(batches.begin(txid), "SPARK_FAILED: it broke: \x1b[31mred")
    store.halt_batch("flights", 4, "SOURCE_CHANGED: a.csv is gone")
    assert {given: [batch["txid"] for batch in tidegate.json("inspect", "flights", *given)] for given in CHOSEN} == CHOSEN


USAGE, PERMANENT, TRY_AGAIN = 2, 1, 75
VERBS = (
    *("trigger flights", "run flights", "inspect flights", "retry flights", "resume flights", "reinstate flights"),
    *("backfill flights --from-txid 1 --to-txid 2", "get flights daily UA 2013-01-01", "quarantine list flights"),
    *("skip flights 1 --reason useless --yes", "redo flights 1 --reason wrong --yes", "pause flights --reason moved"),
    *("quarantine replay flights --reason fixed", "retire flights --reason useless --yes", "rebuild flights --yes"),
)


def _fails(done, exit_code: int, *fragments: str) -> None:
    assert done.returncode == exit_code, done.stderr
    *progress, error, more = done.stderr.splitlines()
    assert all(line.startswith("flights: ") for line in progress)
    assert error_pages.has_page(more.removeprefix("More: tidegate error "))
    assert error.startswith("tidegate: ")
    assert done.stdout == ""
    for fragment in fragments:
        assert fragment in error


@pytest.mark.promise("error:STORE_UNAVAILABLE")
def test_without_a_ledger_every_verb_says_what_is_missing(tidegate: CommandLine, server: Server, tmp_path: Path) -> None:
    passfile = tmp_path / "pgpass"
    passfile.write_text("*:*:*:*:not-the-password\n")
    passfile.chmod(0o600)
    with server.database() as empty:
        elsewhere = replace(tidegate, settings=replace(tidegate.settings, pg_database=empty))
        for arguments in map(str.split, VERBS):
            _fails(tidegate(*arguments, PGPORT="1"), TRY_AGAIN, "127.0.0.1", "port 1", "tidegate up")
            refused = tidegate(*arguments, PGPASSFILE=str(passfile))
            _fails(refused, PERMANENT, "tidegate", "password")
            assert "not-the-password" not in refused.stderr
            _fails(elsewhere(*arguments), PERMANENT, "tidegate migrate")


@pytest.mark.promise("limit:MAX_BATCHES_PER_RUN")
def test_a_wrong_request_names_the_right_one(tidegate: CommandLine) -> None:
    for verb, *fragments in (
        ("inspect flights --state dayly", "no state dayly", "daily"),
        ("inspect flights --txid 7", "txid 7"),
        ("get flights daily UA 'the first'", "the first", "date"),
        ("run flights --from-txid 2", "txid 1"),
        ("migrate --new more --accept-epoch", "a command of its own"),
        ("backfill flights --from-txid 1 --to-txid 2000000000", "opened no txid", "end at 1000"),
    ):
        _fails(tidegate(*shlex.split(verb)), USAGE, *fragments)
