"""The verbs of operators: retry, skip, redo, pause, resume, quarantine."""

import json
import re
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from tests.cli.conftest import CommandLine, write_file, write_flights
from tests.store import Attempt, Tracked, encode_metadata, range_partitions
from tidegate.commands.act.operator_verbs import operator
from tidegate.jobs.pipelines import flights
from tidegate.state_store import StateStore

GOOD = "2013,1,1,517,2,UA,1545,EWR,IAH,1400"
ORDERS = ("shop,cents", "Lisbon,1250", "Lisbon,990", "Porto,0", "Porto,seven", "Porto,700")
USAGE, TRY_AGAIN = 2, 75
ME = operator("skip").partition(",")[0]
SPEC = flights.PIPELINE.spec


def _plan(store: StateStore, number: int) -> None:
    """Open batches of flights with no files."""
    after = store.last_opened("flights")
    assert store.open_batches(SPEC, "run", [], after, [encode_metadata({"files": [], "n": n}) for n in range(number)])


def _begin(store: StateStore, txid: int) -> Attempt:
    attempt = store.start_attempt(SPEC, txid, "test")
    assert isinstance(attempt, Attempt)
    return attempt


def _airflow_away(tidegate: CommandLine) -> dict[str, str]:
    password = tidegate.settings.home / "password"
    password.write_text("secret")
    return {"TIDEGATE_AIRFLOW_URL": "http://127.0.0.1:1", "TIDEGATE_AIRFLOW_PASSWORD_FILE": str(password)}


# pause and resume


@pytest.mark.promise("verb:pause")
def test_a_paused_pipeline_starts_no_run_and_names_the_operator_who_paused_it(tidegate: CommandLine) -> None:
    """Every verb that starts runs says so, with the way out; its exit code means: try again."""
    done = tidegate("pause", "flights", "--reason", "the warehouse is moved.")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no new run starts" in done.stderr
    assert "tidegate resume flights" in done.stderr

    runs = (
        ("run", "flights"),
        ("trigger", "flights"),
        ("backfill", "flights", "--from-txid", "1", "--to-txid", "2"),
        ("retry", "flights"),
        ("quarantine", "replay", "flights", "--reason", "why not"),
    )
    for arguments in runs:
        refused = tidegate(*arguments)
        assert refused.returncode == TRY_AGAIN, refused.stderr
        assert f"flights was paused by {ME}, tidegate pause" in refused.stderr
        assert "the warehouse is moved. Go on with: tidegate resume flights" in refused.stderr

    shown = tidegate("status").stdout
    assert f"paused by {ME}, tidegate pause: the warehouse is moved" in shown


@pytest.mark.promise("verb:pause", "verb:resume", "json:pause", "json:resume")
def test_pausing_and_resuming_again_change_nothing(tidegate: CommandLine) -> None:
    """The first reason stays; a pipeline that runs cannot be resumed."""
    assert tidegate.json("resume", "flights") == {"pipeline": "flights", "paused": False, "already": True}
    assert "was not paused" in tidegate("resume", "flights").stderr

    first = tidegate.json("pause", "flights", "--reason", "a move")
    again = tidegate.json("pause", "flights", "--reason", "another reason")
    assert (first["paused"], first["already"], first["paused_reason"]) == (True, False, "a move")
    assert (again["paused"], again["already"], again["paused_reason"]) == (True, True, "a move")
    assert f"paused already, on {first['paused_at'][:10]}" in tidegate("pause", "flights", "--reason", "again").stderr

    assert tidegate.json("resume", "flights", "--reason", "moved") == {"pipeline": "flights", "paused": False, "already": False}
    (lag,) = (row for row in tidegate.json("status")["pipelines"] if row["pipeline"] == "flights")
    assert (lag["paused_by"], lag["quarantined"]) == (None, 0)


def test_an_empty_reason_is_refused(tidegate: CommandLine) -> None:
    """Later readers of the ledger need the reason."""
    for arguments in (
        ("pause", "flights", "--reason", " "),
        ("skip", "flights", "1", "--reason", ""),
        ("redo", "flights", "1", "--reason", " "),
        ("quarantine", "replay", "flights", "--reason", ""),
    ):
        done = tidegate(*arguments)
        assert done.returncode == USAGE
        assert done.stderr.startswith("tidegate: Give a reason: --reason '")


# retry


@pytest.mark.promise("json:retry")
def test_a_retry_without_waiting_batches_says_so(tidegate: CommandLine, store: StateStore) -> None:
    """It names the batches that wait for a run instead, and those that have committed."""
    assert "Nothing to retry" in tidegate("retry", "flights").stderr
    _plan(store, 2)

    done = tidegate("retry", "flights")
    assert done.returncode == 0
    assert "Txids 1-2 wait for a run: tidegate trigger flights --wait" in done.stderr
    assert tidegate.json("retry", "flights") == {"pipeline": "flights", "lifted": []}

    store.seal(_begin(store, 1), [], Tracked(0))
    store.commit_batch(SPEC, 1, "test")
    committed = tidegate("retry", "flights", "1")
    assert committed.returncode == 0
    assert "flights 1 has committed on" in committed.stderr


@pytest.mark.promise("error:AIRFLOW_UNAVAILABLE")
def test_a_retry_without_airflow_names_the_lifted_batches_and_the_next_step(tidegate: CommandLine, store: StateStore) -> None:
    """The lift stays, with its mark in the ledger, so the run alone is missing."""
    _plan(store, 3)
    store.fail_attempt(_begin(store, 2), "BAD_KEY: NULL.", is_poison=True)
    store.halt_batch("flights", 1, "SOURCE_CHANGED: a.csv")
    store.give_up("flights", 2, "the pipeline's policy", "6 tries failed")

    done = tidegate("retry", "flights", "--reason", "a.csv is back", **_airflow_away(tidegate))

    assert (done.returncode, done.stdout) == (TRY_AGAIN, "")
    assert done.stderr.startswith("tidegate: flights: txids 1-2 may be tried again. But no run has started: Airflow does not")
    assert done.stderr.endswith("Then go on: tidegate trigger flights --wait\nMore: tidegate error AIRFLOW_UNAVAILABLE\n")
    first, second, _ = tidegate.json("inspect", "flights")
    assert (first["phase"], second["waits_for"]) == ("planned", "BAD_KEY: NULL.")
    (action,) = tidegate.json("inspect", "flights", "--txid", "2")["actions"]
    assert (action["action"], action["owner"], action["reason"]) == ("retry", f"{ME}, tidegate retry", "a.csv is back")


@pytest.mark.promise("verb:retry", "json:retry")
def test_a_retry_here_commits_left_over_batches_and_no_new_ones(tidegate: CommandLine) -> None:
    """A file that was missing is back, and its batch commits; new files are left to the next run."""
    write_flights(tidegate.settings.home, 1, GOOD)
    with StateStore.connect(tidegate.settings) as store:
        metadata = flights.PIPELINE.source.coordinator(tidegate.settings).initialize_transaction(1, None, None)
        assert metadata is not None
        assert store.open_batches(SPEC, "an earlier run", [], None, [encode_metadata(metadata)])
        store.halt_batch("flights", 1, "SOURCE_CHANGED: the file was away")
    write_flights(tidegate.settings.home, 2, GOOD)

    outcome = tidegate.json("retry", "flights", "1", "--here")

    assert (outcome["lifted"], outcome["committed"], outcome["state"]) == ([1], [1], "success")
    assert len(tidegate.json("inspect", "flights")) == 1


# skip


def test_only_failed_batches_are_skipped_and_in_their_turn(tidegate: CommandLine, store: StateStore) -> None:
    """Any failed txid can be given up; it is skipped when its turn comes."""
    _plan(store, 3)
    for yes in ([], ["--yes"]):
        done = tidegate("skip", "flights", "2", "--reason", "no use", *yes)
        assert done.returncode == USAGE
        assert "flights 2 has not failed" in done.stderr
    store.fail_attempt(_begin(store, 2), "OVERFLOW: cents.", is_poison=True)

    unconfirmed = tidegate("skip", "flights", "2", "--reason", "no use")
    assert unconfirmed.returncode == USAGE
    assert "flights 2 is failed (OVERFLOW: cents). Skipping it leaves all its rows out" in unconfirmed.stderr

    given_up = tidegate.json("skip", "flights", "2", "--reason", "no use", "--yes")
    assert given_up == {"txid": 2, "skipped": False, "given_up": True, "already": False}
    waits = tidegate.json("inspect", "flights")[1]["waits_for"]
    assert waits == "its turn to be skipped: no use"

    store.seal(_begin(store, 1), [], Tracked(0))
    store.commit_batch(SPEC, 1, "test")
    skipped = tidegate.json("skip", "flights", "2", "--reason", "no use", "--yes")
    assert skipped == {"txid": 2, "skipped": True, "given_up": True, "already": False}
    again = tidegate.json("skip", "flights", "2", "--reason", "no use")
    assert again == {"txid": 2, "skipped": True, "given_up": True, "already": True}
    assert "flights 2 has been skipped: nothing to retry" in tidegate("retry", "flights", "2").stderr


def test_a_run_names_the_batches_that_its_pipeline_gave_up(shops: CommandLine) -> None:
    """A batch that is skipped by policy did not commit, and does not hold up the next one."""
    write_file(shops.settings.home, "visits/1.csv", "page,seconds", "home,many")
    write_file(shops.settings.home, "visits/2.csv", "page,seconds", "home,3")

    done = shops("run", "visits")

    assert done.returncode == 0, done.stderr
    assert "Committed: txid 2." in done.stderr
    assert "Given up and skipped, without their rows: txid 1. Why: tidegate inspect visits --txid 1" in done.stderr
    shown = shops("inspect", "visits", "--txid", "1").stdout
    assert "skipped_reason" in shown
    assert "it failed in try 1 of 1, with MALFORMED_RECORD" in shown


# redo


@pytest.mark.promise("decision:0017")
def test_an_impossible_redo_is_refused_with_or_without_yes(shops: CommandLine, store: StateStore) -> None:
    """Only the last committed txid of a pipeline whose states keep previous values can be redone."""
    _plan(store, 1)
    store.seal(_begin(store, 1), [], Tracked(0))
    store.commit_batch(SPEC, 1, "test")

    for pipeline, txid, fragment in (
        ("flights", "1", "state daily is not opaque"),
        ("flights", "2", "flights has no txid 2"),
        ("orders", "1", "orders has no txid 1"),
    ):
        for yes in ([], ["--yes"]):
            done = shops("redo", pipeline, txid, "--reason", "it was wrong", *yes)
            assert (done.returncode, done.stdout) == (USAGE, "")
            assert fragment in done.stderr


@pytest.mark.promise("verb:redo", "json:redo", "decision:0017")
def test_the_last_batch_is_redone_only_with_yes_and_counts_once(shops: CommandLine) -> None:
    """The state equals that of one clean run, and the ledger keeps both attempts, operator and reason."""
    write_file(shops.settings.home, "orders/1.csv", *ORDERS)
    assert shops.json("run", "orders")["committed"] == [1]
    before = shops.json("inspect", "orders", "--state", "revenue")

    unconfirmed = shops("redo", "orders", "1", "--reason", "the till was wrong")
    assert (unconfirmed.returncode, unconfirmed.stdout) == (USAGE, "")
    assert "orders 1 has committed on" in unconfirmed.stderr
    assert "takes back what it did to revenue" in unconfirmed.stderr
    assert "Add --yes" in unconfirmed.stderr

    passwords = [line for line in shops.settings.pg_passfile.read_text().splitlines() if "tidegate_owner" not in line]
    (passfile := shops.settings.home / "pgpass").touch(0o600)
    passfile.write_text("\n".join(passwords))
    refused = shops("redo", "orders", "1", "--reason", "the till was wrong", "--yes", PGPASSFILE=str(passfile))
    assert refused.returncode == 1
    assert "tidegate_owner" in refused.stderr
    assert len(shops.json("inspect", "orders", "--txid", "1")["attempts"]) == 1  # nothing was processed in vain

    done = shops.json("redo", "orders", "1", "--reason", "the till was wrong", "--yes")
    assert (done["txid"], done["attempt"], done["replaced"]) == (1, 2, 1)
    assert shops.json("inspect", "orders", "--state", "revenue") == before
    assert len(shops.json("quarantine", "list", "orders")) == 2

    shown = shops("inspect", "orders", "--txid", "1").stdout
    assert "redo" in shown
    assert "the till was wrong" in shown
    assert max(len(line) for line in shown.splitlines()) <= 120


# prune


@pytest.mark.promise("verb:changes", "verb:prune", "json:changes", "json:prune")
def test_old_changes_are_removed_only_with_yes_and_by_the_owner(shops: CommandLine) -> None:
    """It says first what it would do; the ledger keeps operator and reason, and later ones are still shown."""
    for number, amount in enumerate((100, 200, 300), start=1):
        write_file(shops.settings.home, f"orders/{number}.csv", "shop,cents", f"Lisbon,{amount}")
    assert shops.json("run", "orders")["committed"] == [1, 2, 3]
    assert [change["txid"] for change in shops.json("changes", "orders", "revenue")] == [1, 2, 3]

    for state in ("per_page", "nothing"):
        refused = shops("prune", "orders", state, "--keep", "1")
        assert (refused.returncode, refused.stdout) == (USAGE, "")
        assert f"Pipeline orders has no state {state} that records changes" in refused.stderr
    unconfirmed = shops("prune", "orders", "revenue", "--keep", "1")
    assert (unconfirmed.returncode, unconfirmed.stdout) == (USAGE, "")
    assert "by txids 1 to 2 would be removed" in unconfirmed.stderr
    assert len(shops.json("changes", "orders", "revenue")) == 3

    unknown = shops("prune", "orders", "revenue", "--keep", "1", "--without", "flights")
    assert (unknown.returncode, "Pipeline flights does not follow orders.revenue" in unknown.stderr) == (USAGE, True)

    done = shops.json("prune", "orders", "revenue", "--keep", "1", "--reason", "a year is over", "--yes")
    assert done == {
        "pipeline": "orders",
        "state": "revenue",
        "up_to_txid": 2,
        "changes": 2,
        "partitions": [],
        "kept": [],
        "followers": {},
    }
    again = shops("prune", "orders", "revenue", "--keep", "1", "--yes")
    assert (again.returncode, "There is nothing to remove" in again.stderr) == (0, True)
    shown = shops("changes", "orders", "revenue")
    assert "The changes by txids up to 2 were removed." in shown.stderr
    assert [change["txid"] for change in shops.json("changes", "orders", "revenue")] == [3]


def test_old_partitions_of_changes_are_removed_with_the_rest(shops: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole, if all of it is old, and the rest one by one."""
    monkeypatch.setattr(range_partitions, "TXIDS", 2)
    for number, amount in enumerate((100, 200, 300, 400, 500), start=1):
        write_file(shops.settings.home, f"orders/{number}.csv", "shop,cents", f"Lisbon,{amount}")
    assert shops.json("run", "orders")["committed"] == [1, 2, 3, 4, 5]
    said = "revenue_changes$0, revenue_changes$2 and 1 more change of revenue removed, up to txid 4."
    assert said in shops("prune", "orders", "revenue", "--keep", "1", "--yes").stderr
    assert [change["txid"] for change in shops.json("changes", "orders", "revenue")] == [5]
    rest = shops.json("prune", "orders", "revenue", "--keep", "0", "--yes")
    assert (rest["changes"], rest["partitions"]) == (0, ["revenue_changes$4"])
    assert shops.json("changes", "orders", "revenue") == []
    again = shops("prune", "orders", "revenue", "--keep", "0", "--yes")
    assert "There is nothing to remove: changes of revenue are kept from txid 6 on." in again.stderr + again.stdout


@pytest.mark.promise("verb:prune", "json:prune")
def test_old_partitions_are_removed_only_with_yes_and_by_the_owner(shops: CommandLine) -> None:
    """Or they are detached; what is asked the wrong way changes nothing."""
    write_file(shops.settings.home, "orders/1.csv", "shop,cents", *(f"Lisbon,{amount}" for amount in (500, 1500, 1600, 3100)))
    assert shops.json("run", "orders")["committed"] == [1]

    for wrong, refusal in (
        (("sale", "--keep", "1"), "State sale has range partitions: say with --before"),
        (("sale",), "State sale has range partitions: say with --before"),
        (("revenue", "--before", "1"), "State revenue records its changes: say with --keep"),
        (("revenue", "--keep", "1", "--detach"), "State revenue records its changes: say with --keep"),
        (("sale", "--before", "May"), "'May' is no value of column cents of state sale: its type is integer"),
        (("sale", "--before", "2000"), "sale$0, sale$1000 would be removed. Add --yes to do it."),
        (("sale", "--before", "2000", "--detach"), "sale$0, sale$1000 would be detached. Add --yes to do it."),
    ):
        refused = shops("prune", "orders", *wrong)
        assert (refused.returncode, refused.stdout) == (USAGE, "")
        assert refusal in refused.stderr
    assert len(shops.json("inspect", "orders", "--state", "sale")) == 4

    removed = shops.json("prune", "orders", "sale", "--before", "1999", "--yes")
    assert removed == {
        "pipeline": "orders",
        "state": "sale",
        "up_to_txid": 1,
        "changes": 0,
        "partitions": ["sale$0"],
        "kept": [],
        "followers": {},
    }
    detached = shops("prune", "orders", "sale", "--before", "2000", "--detach", "--reason", "archived", "--yes")
    assert "sale$1000 detached. Now it is table state.sale$1000$kept." in detached.stderr + detached.stdout
    again = shops("prune", "orders", "sale", "--before", "2000", "--yes")
    assert (again.returncode, "There is nothing to remove" in again.stderr) == (0, True)
    assert [row["cents"] for row in shops.json("inspect", "orders", "--state", "sale")] == [3100]


def test_a_prune_that_fails_midway_says_what_is_removed(
    shops: CommandLine, as_owner: Callable[[sa.Executable], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier transactions stay: the next prune goes on after them."""
    write_file(shops.settings.home, "orders/1.csv", "shop,cents", *(f"Lisbon,{thousands}500" for thousands in range(5)))
    assert shops.json("run", "orders")["committed"] == [1]
    as_owner(sa.text('CREATE VIEW state.shown AS SELECT * FROM state."sale$3000"'))
    monkeypatch.setattr(range_partitions, "MOST_AT_ONCE", 2)
    failed = shops("prune", "orders", "sale", "--before", "5000", "--yes")
    assert (failed.returncode, "cannot drop table" in failed.stderr) == (1, True)
    assert "sale$0, sale$1000 removed. Then it failed." in failed.stderr
    as_owner(sa.text("DROP VIEW state.shown"))
    done = shops.json("prune", "orders", "sale", "--before", "5000", "--yes")
    assert done["partitions"] == ["sale$2000", "sale$3000", "sale$4000"]


# quarantine


@pytest.mark.promise("verb:quarantine", "json:quarantine-list", "json:quarantine-replay")
def test_bad_records_are_listed_and_taken_up_again(shops: CommandLine) -> None:
    """Records that are still bad wait again, under the new txid; none is lost or counted twice."""
    home = shops.settings.home
    write_file(home, "orders/1.csv", *ORDERS)
    assert "No record of orders waits in quarantine." in shops("quarantine", "list", "orders").stderr
    nothing = shops.json("quarantine", "replay", "orders", "--reason", "to see")
    assert nothing == {"replayed_txid": None, "records": 0}
    shops.json("run", "orders")

    shown = shops("quarantine", "list", "orders", "--limit", "1")
    assert shown.stdout.startswith("Waiting in quarantine: 2\ntxid  records\n")
    assert "There are more records" in shown.stderr
    assert max(len(line) for line in shown.stdout.splitlines()) <= 200
    waiting = shops.json("quarantine", "list", "orders", "--txid", "1")
    assert [(row["txid"], row["number"]) for row in waiting] == [(1, 1), (1, 2)]
    assert {row["is_raw"] for row in waiting} == {True, False}
    assert "fails the check 'paid'" in {row["reason"] for row in waiting}
    (lag,) = (row for row in shops.json("status")["pipelines"] if row["pipeline"] == "orders")
    assert lag["quarantined"] == 2

    away = shops("quarantine", "replay", "orders", "--reason", "try them", **_airflow_away(shops))
    assert away.returncode == TRY_AGAIN
    assert "orders: 2 records left quarantine, for txid 2. But no run has started" in away.stderr
    assert "Source: quarantine" in shops("inspect", "orders", "--txid", "2").stdout
    assert shops.json("run", "orders")["committed"] == [2]

    replayed = shops.json("quarantine", "replay", "orders", "--txid", "2", "--reason", "once more", "--here")
    assert (replayed["replayed_txid"], replayed["records"], replayed["committed"]) == (3, 2, [3])
    assert {row["txid"] for row in shops.json("quarantine", "list", "orders")} == {3}
    revenue = {row["shop"]: (row["orders"], row["cents"]) for row in shops.json("inspect", "orders", "--state", "revenue")}
    assert revenue == {"Lisbon": (2, 2240), "Porto": (1, 700)}


@pytest.mark.promise("verb:quarantine", "json:quarantine-mend")
def test_a_mended_record_counts_after_its_replay(shops: CommandLine) -> None:
    """From the command line or a file; the list shows it, the ledger keeps the original and who mended it."""
    home = shops.settings.home
    write_file(home, "orders/1.csv", *ORDERS)
    shops.json("run", "orders")
    numbers = {row["is_raw"]: row["number"] for row in shops.json("quarantine", "list", "orders")}

    raw = shops("quarantine", "mend", "orders", "1", str(numbers[True]), "--reason", "it says 7", "--payload", "Porto,7")
    assert raw.returncode == 0, raw.stderr
    assert f"orders 1, record {numbers[True]}, is mended" in raw.stderr
    assert 'tidegate quarantine replay orders --txid 1 --reason "..."' in raw.stderr
    record = ("orders", "1", str(numbers[True]))
    for payload, why in (("Porto,-7", "fails the check 'paid'"), ("Porto,VII", "column cents")):
        bad = shops.json("quarantine", "mend", *record, "--reason", "a slip", "--payload", payload, "--again")
        assert why in bad["still_bad"]
    bad = shops("quarantine", "mend", *record, "--reason", "again", "--payload", "Porto,-7", "--again")
    assert "is mended. But it is still bad, and would wait again after a replay: fails the check 'paid'." in bad.stderr
    untried = shops(
        *("quarantine", "mend", *record, "--reason", "it says 7", "--payload", "Porto,7", "--again"),
        TIDEGATE_SPARK_REMOTE="sc://127.0.0.1:1",
    )
    assert untried.returncode == 0
    assert "Whether it is good now could not be tried: Nothing answers at 127.0.0.1:1" in untried.stderr
    again = shops("quarantine", "mend", *record, "--reason", "no, 8", "--payload", "Porto,8")
    assert again.returncode == USAGE
    assert "To replace that, say so: --again" in again.stderr
    mended = home / "mended.json"
    mended.write_text('{"shop": "Porto", "cents": 5}\r\n')
    arguments = ("orders", "1", str(numbers[False]), "--reason", "a gift", "--payload-from", str(mended))
    done = shops.json("quarantine", "mend", *arguments)
    assert done == {
        "pipeline": "orders",
        "txid": 1,
        "number": numbers[False],
        "mended_by": f"{ME}, tidegate quarantine mend",
        "still_bad": None,
        "untried": None,
    }

    shown = shops("quarantine", "list", "orders").stdout
    assert re.search(r"^txid  number  reason .* payload +mended$", shown, re.MULTILINE)
    assert "Porto,7" in shown
    rows = {row["number"]: row for row in shops.json("quarantine", "list", "orders")}
    assert rows[numbers[True]]["payload"] == "Porto,seven"
    assert rows[numbers[False]]["mended_payload"] == '{"shop": "Porto", "cents": 5}'
    actions = shops.json("inspect", "orders", "--txid", "1")["actions"]
    assert [(action["action"], action["reason"]) for action in actions] == [
        *(("mend", f"record {numbers[True]}: {why}") for why in ("it says 7", "a slip", "a slip", "again", "it says 7")),
        ("mend", f"record {numbers[False]}: a gift"),
    ]

    assert shops.json("quarantine", "replay", "orders", "--reason", "mended", "--here")["committed"] == [2]
    revenue = {row["shop"]: (row["orders"], row["cents"]) for row in shops.json("inspect", "orders", "--state", "revenue")}
    assert revenue == {"Lisbon": (2, 2240), "Porto": (3, 712)}


BAD_MENDS: dict[str, tuple[bytes | None, str]] = {
    "no file": (None, "cannot be read: No such file or directory."),
    "not UTF-8": (b"Porto,\xff", "is not UTF-8: see its byte 7."),
    "NUL": (b"Porto,\0", "holds a NUL character"),
    "empty": (b"\n", "is empty"),
    "10 MB": (b"x" * 10_000_000, "is too long: a mended record can have 8388608 bytes."),
}


def test_what_is_no_record_of_a_txid_is_refused(tidegate: CommandLine) -> None:
    """Before anything changes; with a sentence, not a traceback. A mistyped txid does not look like an empty quarantine."""
    file, mend = tidegate.settings.home / "mended", ("quarantine", "mend", "flights", "1", "1", "--reason", "why not")
    for content, message in BAD_MENDS.values():
        if content is not None:
            file.write_bytes(content)
        done = tidegate(*mend, "--payload-from", str(file))
        assert (done.returncode, message in done.stderr) == (USAGE, True), done.stderr
        assert len(done.stderr.splitlines()) == 2  # the message, and where there is more
    for payloads in ((), ("--payload", "a", "--payload-from", "-")):
        done = tidegate(*mend, *payloads)
        assert (done.returncode, "one of --payload and --payload-from" in done.stderr) == (USAGE, True)
    for verb, *options in (("list",), ("replay", "--reason", "why not")):
        done = tidegate("quarantine", verb, "flights", "--txid", "7", *options)
        assert (done.returncode, "flights has no txid 7" in done.stderr) == (USAGE, True)


# inspect


INPUTS: list[tuple[dict, list[str]]] = [
    (
        {
            "topic": "clicks",
            "topic_id": "x",
            "partitions": {"10": {"start": 5, "end": 9}, "2": {"start": 7, "end": 8, "lost": [3, 7]}},
            "idle": {"0": {"start": 1, "end": 4}},
        },
        ["Source: topic clicks", "partition start end records lost", "2 7 8 1 4", "10 5 9 4 0", "0 4 4 0 0"],
    ),
    (
        {"after": None, "to": ["2026-11-01 10:00:00+00", "7"], "splits": [["a"], ["b"]], "rows": 12},
        ["after to splits rows when planned", "the beginning 2026-11-01 10:00:00+00, 7 2 12"],
    ),
    ({"partitions": {"a": {"rows": [1, 2]}}, "idle": {}}, ["Source: partitions", 'a reads {"rows": [1, 2]}']),
    ({"_quarantined": 3, "source": None}, ["Source: quarantine", "records", "3"]),
    (
        {
            "inputs": {
                "clicks": {"partitions": {"0": {"start": 7, "end": 8}}, "idle": {}, "topic": "clicks"},
                "late": {"files": [{"name": "1.csv", "size": 9, "mtime_ns": 1, "sha256": "ab"}], "behind": None},
                "other": {"position": 4},
            },
            "idle": {"orders": {"position": 1}},
            "references": {"planes": {"files": [{"name": "planes.csv", "size": 8, "mtime_ns": 1, "sha256": "cd"}]}},
        },
        [
            *["Source of input clicks: topic clicks", "0 7 8 1 0", "Files of input late", "1.csv 9 ab"],
            *["Source of input other", '"position": 4', "Inputs without new rows", "orders"],
            *["Files of reference planes", "planes.csv 8 cd"],
        ],
    ),
    ({"files": [{"name": "a.csv", "size": 7, "mtime_ns": 1, "sha256": "ab"}]}, ["name bytes sha256", "a.csv 7 ab"]),
    (
        {
            **{"table": "x", "version": 17, "snapshot": False, "after": None, "taken": 3},
            "data_files": [{"name": "a.parquet", "size": 7, "sha256": "ab", "change": "insert"}],
        },
        ["Data files, up to a part of version 17", "name bytes sha256 change", "a.parquet 7 ab insert"],
    ),
    (
        {"table": "x", "snapshot": "42", "whole": True, "taken": None, "data_files": []},
        ["Data files, up to snapshot 42: none, as nothing was added."],
    ),
    ({"ticks": 7}, ['"ticks": 7']),
]


def test_a_batch_shows_its_input_in_the_terms_of_its_source(tidegate: CommandLine, store: StateStore) -> None:
    """Offsets, ranges and files are tables; other metadata is shown as JSON."""
    assert store.open_batches(SPEC, "run", [], None, [encode_metadata(metadata) for metadata, _ in INPUTS])
    for txid, (metadata, lines) in enumerate(INPUTS, start=1):
        done = tidegate("inspect", "flights", "--txid", str(txid))
        shown = [" ".join(line.split()) for line in done.stdout.splitlines()]
        assert [line for line in lines if line not in shown] == []
        found = tidegate("inspect", "flights", "--txid", str(txid), "--json")
        assert json.loads(found.stdout)["source_metadata"] == metadata


def test_a_batch_shows_its_attempts_with_times_rows_and_errors(tidegate: CommandLine) -> None:
    """All in tables that fit a terminal."""
    file = write_flights(tidegate.settings.home, 1, GOOD)
    content = file.read_bytes()
    with StateStore.connect(tidegate.settings) as store:
        metadata = flights.PIPELINE.source.coordinator(tidegate.settings).initialize_transaction(1, None, None)
        assert metadata is not None
        assert store.open_batches(SPEC, "an earlier run", [], None, [encode_metadata(metadata)])
    file.unlink()
    assert tidegate("run", "flights").returncode == 1
    file.write_bytes(content)
    assert tidegate.json("run", "flights")["committed"] == [1]

    shown = tidegate("inspect", "flights", "--txid", "1").stdout

    titles = ["Files", "Attempts", "Why attempts failed", "What attempts sealed", "Where attempts ran", "Sealed partitions"]
    assert [line for line in shown.splitlines() if line in titles] == titles
    for fragment in ("processing  sealing  waiting  merging  outcome", "SOURCE_", "run 20", "failed", "committed"):
        assert fragment in shown
    assert max(len(line) for line in shown.splitlines()) <= 120
