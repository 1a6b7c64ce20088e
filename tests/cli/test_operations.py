"""The verbs of operators: pause, resume, retire, reinstate, retry, redo, prune, quarantine; and a run that is followed."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.batches import Batches
from tests.cli.conftest import GOOD, CommandLine, write_file, write_flights
from tests.store import Request, encode_metadata
from tidegate import airflow_client
from tidegate.commands.act import run_verbs
from tidegate.commands.act.operator_name import operator
from tidegate.jobs.pipelines import flights
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import PipelineRetired

ORDERS = ("shop,cents", "Lisbon,1250", "Lisbon,990", "Porto,0", "Porto,seven", "Porto,700")
TRY_AGAIN = 75
ME = operator("skip").partition(",")[0]
SPEC = flights.PIPELINE.spec


def _revenue(shops: CommandLine) -> dict[str, tuple[int, int]]:
    return {row["shop"]: (row["orders"], row["cents"]) for row in shops.json("inspect", "orders", "--state", "revenue")}


@pytest.mark.promise("verb:pause", "verb:resume", "json:pause", "json:resume")
def test_a_paused_pipeline_starts_no_run_until_it_is_resumed(tidegate: CommandLine) -> None:
    assert tidegate.json("resume", "flights") == {"pipeline": "flights", "paused": False, "already": True}
    first = tidegate.json("pause", "flights", "--reason", "the warehouse is moved.")
    for done, already in ((first, False), (tidegate.json("pause", "flights", "--reason", "another reason"), True)):
        assert (done["paused"], done["already"], done["paused_reason"]) == (True, already, "the warehouse is moved.")
    assert f"paused already, on {first['paused_at'][:10]}" in tidegate("pause", "flights", "--reason", "again").stderr
    runs = ("run flights", "trigger flights", "backfill flights --from-txid 1 --to-txid 2", "retry flights")
    for verb in (*runs, "quarantine replay flights --reason fixed"):
        refused = tidegate.refused(*verb.split(), exit_code=TRY_AGAIN)
        says = f"flights was paused by {ME}, tidegate pause.*the warehouse is moved. Go on with: tidegate resume flights"
        assert re.search(says, refused)
    assert f"paused by {ME}, tidegate pause: the warehouse is moved" in tidegate("status").stdout
    assert tidegate.json("resume", "flights", "--reason", "moved") == {"pipeline": "flights", "paused": False, "already": False}
    (lag,) = (row for row in tidegate.json("status")["pipelines"] if row["pipeline"] == "flights")
    assert (lag["paused_by"], lag["quarantined"]) == (None, 0)


@pytest.mark.promise("verb:retire", "verb:reinstate", "json:reinstate", "json:retire", "json:migrate")
def test_a_retired_pipeline_is_refused_everywhere_and_goes_on_when_it_is_reinstated(shops: CommandLine) -> None:
    home, why = shops.settings.home, ("--reason", "replaced by orders_by_hour")
    write_file(home, "orders/1.csv", "shop,cents", "Lisbon,1250", "Porto,0", ",5")
    assert shops.json("run", "orders")["committed"] == [1]
    unconfirmed = shops.refused("retire", "orders", *why)
    assert unconfirmed.startswith("tidegate: orders would be retired at txid 1: no batch of it would count any more. 1 bad")
    assert "Its states stay as tables that can be read: revenue, revenue_changes, sale. Add --yes to do it." in unconfirmed
    assert [row["pipeline"] for row in shops.json("status")["pipelines"]] == ["flights", "orders", "visits"]

    done = shops.json("retire", "orders", *why, "--yes")
    assert (done["already"], done["committed"], done["quarantined"], done["staging_dropped"]) == (False, 1, 1, 1)
    assert (done["retired_by"], done["retired_reason"]) == (f"{ME}, tidegate retire", "replaced by orders_by_hour")
    again = shops("retire", "orders", "--reason", "once more", "--yes")
    assert (again.returncode, again.stdout) == (0, "")
    assert f"orders was retired already, on {done['retired_at'][:10]}" in again.stderr

    write_file(home, "orders/2.csv", "shop,cents", "Lisbon,1000")
    runs = ("run orders", "trigger orders", "backfill orders --from-txid 1 --to-txid 2", "retry orders", "resume orders")
    acts = ("redo orders 1 --reason wrong --yes", "prune orders revenue --keep 0 --yes", "pause orders --reason moved")
    of_records = ("replay orders --reason fixed", "mend orders 1 1 --reason fixed --payload Porto,7")
    for verb in (*runs, *acts, *(f"quarantine {each}" for each in of_records)):
        refused = shops.refused(*verb.split())
        assert re.search(f"orders was retired by {ME}, tidegate retire on .*\nMore: tidegate error PIPELINE_RETIRED$", refused)

    status = shops.json("status")
    assert [row["pipeline"] for row in status["pipelines"]] == ["flights", "visits"]
    assert [(row["pipeline"], row["committed"]) for row in status["retired"]] == [("orders", 1)]
    assert "Retired: orders. When and why: tidegate why orders" in shops("status").stderr
    assert "orders was retired by" in shops("why", "orders").stdout
    assert shops.json("inspect", "orders")[0]["phase"] == "committed"
    assert shops.json("get", "orders", "revenue", "Lisbon")[0]["row"]["cents"] == 1250
    (null,) = shops.json("get", "orders", "revenue", "-", "--null", "-")
    assert (null["key"], null["row"]["cents"]) == ([None], 5)
    for changed in (["word_count"], []):
        migrated = shops.json("migrate")
        assert (migrated["changed"], list(migrated["retired"])) == (changed, ["orders"])
    assert "Pipeline orders is declared, and left out" in shops("migrate").stderr

    for already in (False, True):
        assert shops.json("reinstate", "orders") == {"pipeline": "orders", "retired": False, "already": already}
    assert shops.json("run", "orders")["committed"] == [2]
    assert _revenue(shops) == {"Lisbon": (2, 2250), None: (1, 5)}
    assert [action["action"] for action in shops.json("inspect", "orders", "--txid", "2")["actions"]] == ["retire", "reinstate"]


@pytest.mark.promise("error:AIRFLOW_UNAVAILABLE", "json:retry")
def test_a_retry_names_what_it_lifts_and_the_next_step(tidegate: CommandLine, store: StateStore) -> None:
    assert "Nothing to retry" in tidegate("retry", "flights").stderr
    batches = Batches(store, flights.PIPELINE)
    batches.plan("run", 3)
    assert "Txids 1-3 wait for a run: tidegate run flights" in tidegate("retry", "flights").stderr
    assert "--wait" in tidegate("retry", "flights", **tidegate.airflow_away()).stderr
    assert tidegate.json("retry", "flights") == {"pipeline": "flights", "lifted": []}
    store.fail_attempt(batches.begin(2), "BAD_KEY: NULL.", is_poison=True)
    store.halt_batch("flights", 1, "SOURCE_CHANGED: a.csv")
    store.give_up("flights", 2, "the pipeline's policy", "6 tries failed")
    retry = ("retry", "flights", "--reason", "a.csv is back")
    refusal = tidegate.refused(*retry, exit_code=TRY_AGAIN, **tidegate.airflow_away())
    assert refusal.startswith("tidegate: flights: txids 1-2 may be tried again. But no run has started: Airflow does not")
    assert refusal.endswith("Then go on: tidegate trigger flights --wait\nMore: tidegate error AIRFLOW_UNAVAILABLE\n")
    first, second, _ = tidegate.json("inspect", "flights")
    assert (first["phase"], second["waits_for"]) == ("planned", "BAD_KEY: NULL.")
    (action,) = tidegate.json("inspect", "flights", "--txid", "2")["actions"]
    assert (action["action"], action["owner"], action["reason"]) == ("retry", f"{ME}, tidegate retry", "a.csv is back")


@pytest.mark.promise("verb:retry", "json:retry")
def test_a_retry_here_commits_left_over_batches_and_no_new_ones(tidegate: CommandLine, store: StateStore) -> None:
    write_flights(tidegate.settings.home, 1, GOOD)
    metadata = coordinator_of(flights.PIPELINE.source, tidegate.settings).initialize_transaction(1, None, None)
    assert store.open_batches(SPEC, "an earlier run", [], None, [encode_metadata(metadata)])
    store.halt_batch("flights", 1, "SOURCE_CHANGED: the file was away")
    write_flights(tidegate.settings.home, 2, GOOD)
    outcome = tidegate.json("retry", "flights", "1")  # without Airflow, as with --here
    assert (outcome["lifted"], outcome["committed"], outcome["state"]) == ([1], [1], "success")
    assert len(tidegate.json("inspect", "flights")) == 1


def airflow_that(patched: pytest.MonkeyPatch, settings: Settings, task: tuple[str, str], **says: Any) -> None:
    """Let the verbs see an Airflow whose runs have this task in this state, and succeed unless it says otherwise."""
    says = {"trigger": lambda *_: "run", "run_state": lambda *_: "success", "has_run": lambda *_: False} | says
    tasks = [dict(zip(("task_id", "state"), task, strict=True))]
    said = SimpleNamespace(PLAN="plan", task_instances=lambda *_: tasks, close=lambda: None, **says)
    patched.setattr(airflow_client, "AirflowClient", lambda _: said)
    patched.setattr(Settings, "load", lambda *_, **__: settings)


@pytest.mark.promise("error:RUN_UNFINISHED", "verb:trigger")
def test_a_run_that_a_person_another_team_or_a_retirement_ends_is_no_success(
    tidegate: CommandLine, store: StateStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another team's Dag plans nothing; a person has marked a run as a success, whose plan has opened two batches."""
    follow = partial(run_verbs.through_airflow, "flights", {}, 10, as_json=False)
    airflow_that(monkeypatch, tidegate.settings, ("extract", "success"))
    with pytest.raises(run_verbs.RunUnfinished, match="before it planned anything"):
        follow()

    def trigger(*_: object) -> str:
        assert store.open_batches(SPEC, "run", [], None, [encode_metadata({"files": []})] * 2)
        return "run"

    airflow_that(monkeypatch, tidegate.settings, ("plan", "success"), trigger=trigger)
    with pytest.raises(run_verbs.RunUnfinished, match=r"txids 1-2 have not committed: .*tidegate trigger flights --wait"):
        follow()
    assert "Committed" not in capsys.readouterr().out

    def run_state(*_: object) -> str:
        with StateStore.connect(tidegate.settings, user=tidegate.settings.pg_owner) as owner:
            owner.retire("flights", Request("me", "it is replaced", drops_states=False, is_confirmed=True))
        return "failed"

    airflow_that(monkeypatch, tidegate.settings, ("plan", "failed"), run_state=run_state)
    with pytest.raises(PipelineRetired, match="it is replaced"):
        follow()


@pytest.mark.promise("verb:backfill")
def test_a_backfill_whose_batches_another_run_commits_is_done(
    tidegate: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_flights(tidegate.settings.home, 1, GOOD)

    def trigger(*_: object) -> str:
        assert tidegate("run", "flights").returncode == 0  # the scheduled run, after which the backfill is queued
        return "run"

    airflow_that(monkeypatch, tidegate.settings, ("plan", "skipped"), trigger=trigger)
    run_verbs.backfill.callback("flights", 1, 1, False, 10, False)
    assert "Already committed: txid 1." in capsys.readouterr().out


@pytest.mark.promise("verb:redo", "json:redo", "decision:0017")
def test_the_last_batch_is_redone_only_with_yes_and_counts_once(shops: CommandLine) -> None:
    write_file(shops.settings.home, "orders/1.csv", *ORDERS)
    assert shops.json("run", "orders")["committed"] == [1]
    before = shops.json("inspect", "orders", "--state", "revenue")
    redo = ("redo", "orders", "1", "--reason", "the till was wrong")

    for yes in ([], ["--yes"]):
        assert "orders has no txid 2" in shops.refused("redo", "orders", "2", "--reason", "it was wrong", *yes)
    assert re.search("takes back what it did to revenue.*Add --yes", shops.refused(*redo), re.DOTALL)

    passwords = [line for line in shops.settings.pg_passfile.read_text().splitlines() if "tidegate_owner" not in line]
    (passfile := shops.settings.home / "pgpass").touch(0o600)
    passfile.write_text("\n".join(passwords))
    assert "tidegate_owner" in shops.refused(*redo, "--yes", exit_code=1, PGPASSFILE=str(passfile))
    assert len(shops.json("inspect", "orders", "--txid", "1")["attempts"]) == 1  # nothing was processed in vain

    done = shops.json(*redo, "--yes")
    assert (done["txid"], done["attempt"], done["replaced"]) == (1, 2, 1)
    assert shops.json("inspect", "orders", "--state", "revenue") == before
    assert len(shops.json("quarantine", "list", "orders")) == 2

    shown = shops("inspect", "orders", "--txid", "1").stdout
    titles = ["Files", "Attempts", "What attempts sealed", "Where attempts ran", "Sealed partitions"]
    assert [line for line in shown.splitlines() if line in titles] == titles
    for fragment in ("outcome", "redo", "the till was wrong", "committed"):
        assert fragment in shown
    assert max(len(line) for line in shown.splitlines()) <= 120


@pytest.mark.promise("verb:changes", "verb:prune", "json:changes", "json:prune")
def test_old_changes_and_partitions_are_removed_only_with_yes(shops: CommandLine) -> None:
    for number, amounts in enumerate(((500, 1500), (1600,), (3100,)), start=1):
        write_file(shops.settings.home, f"orders/{number}.csv", "shop,cents", *(f"Lisbon,{amount}" for amount in amounts))
    assert shops.json("run", "orders")["committed"] == [1, 2, 3]
    assert [change["txid"] for change in shops.json("changes", "orders", "revenue")] == [1, 2, 3]

    for wrong, refusal in (
        (("nothing", "--keep", "1"), "Pipeline orders has no state nothing that records changes"),
        (("revenue", "--keep", "1"), "by txids 1 to 2 would be removed"),
        (("revenue", "--keep", "1", "--without", "flights"), "Pipeline flights does not follow orders.revenue"),
        (("revenue", "--before", "1"), "State revenue records its changes: say with --keep"),
        (("sale", "--keep", "1"), "State sale has range partitions: say with --before"),
        (("sale", "--before", "May"), "'May' is no value of column cents of state sale: its type is integer"),
        (("sale", "--before", "2000"), "sale$0, sale$1000 would be removed. Add --yes to do it."),
        (("sale", "--before", "2000", "--detach"), "sale$0, sale$1000 would be detached. Add --yes to do it."),
    ):
        assert refusal in shops.refused("prune", "orders", *wrong)
    assert len(shops.json("changes", "orders", "revenue")) == 3
    assert len(shops.json("inspect", "orders", "--state", "sale")) == 4

    usual = {"pipeline": "orders", "changes": 0, "partitions": [], "kept": [], "followers": {}}
    done = shops.json("prune", "orders", "revenue", "--keep", "1", "--reason", "a year is over", "--yes")
    assert done == {**usual, "state": "revenue", "up_to_txid": 2, "changes": 2}
    assert "The changes by txids up to 2 were removed." in shops("changes", "orders", "revenue").stderr
    assert [change["txid"] for change in shops.json("changes", "orders", "revenue")] == [3]
    removed = shops.json("prune", "orders", "sale", "--before", "1999", "--yes")
    assert removed == {**usual, "state": "sale", "up_to_txid": 1, "partitions": ["sale$0"]}
    detached = shops("prune", "orders", "sale", "--before", "2000", "--detach", "--reason", "archived", "--yes")
    assert "sale$1000 detached. Now it is table state.sale$1000$kept." in detached.stderr + detached.stdout
    for again in (("revenue", "--keep", "1"), ("sale", "--before", "2000")):
        done = shops("prune", "orders", *again, "--yes")
        assert (done.returncode, "There is nothing to remove" in done.stderr) == (0, True)
    assert [row["cents"] for row in shops.json("inspect", "orders", "--state", "sale")] == [3100]


@pytest.mark.promise("verb:quarantine", "json:quarantine-list", "json:quarantine-mend", "json:quarantine-replay")
def test_bad_records_are_listed_mended_and_replayed(shops: CommandLine) -> None:
    home = shops.settings.home
    write_file(home, "orders/1.csv", *ORDERS)
    assert "No record of orders waits in quarantine." in shops("quarantine", "list", "orders").stderr
    assert shops.json("quarantine", "replay", "orders", "--reason", "to see") == {"replayed_txid": None, "records": 0}
    shops.json("run", "orders")

    shown = shops("quarantine", "list", "orders", "--limit", "1")
    assert shown.stdout.startswith("Waiting in quarantine: 2\ntxid  records\n")
    assert "There are more records" in shown.stderr
    waiting = shops.json("quarantine", "list", "orders", "--txid", "1")
    assert [(row["txid"], row["number"]) for row in waiting] == [(1, 1), (1, 2)]
    assert "fails the check 'paid'" in {row["reason"] for row in waiting}
    (lag,) = (row for row in shops.json("status")["pipelines"] if row["pipeline"] == "orders")
    assert lag["quarantined"] == 2

    numbers = {row["is_raw"]: str(row["number"]) for row in waiting}
    mend = ("quarantine", "mend", "orders", "1")
    for payload, why in (("Porto,-7", "fails the check 'paid'"), ("Porto,VII", "column cents")):
        assert why in shops.json(*mend, numbers[True], "--reason", "a slip", "--payload", payload, "--again")["still_bad"]
    away = {"TIDEGATE_SPARK_REMOTE": "sc://127.0.0.1:1"}
    untried = shops(*mend, numbers[True], "--reason", "it says 7", "--payload", "Porto,7", "--again", **away)
    assert untried.returncode == 0
    assert "Whether it is good now could not be tried: Nothing answers at 127.0.0.1:1" in untried.stderr
    again = shops.refused(*mend, numbers[True], "--reason", "no, 8", "--payload", "Porto,8")
    assert "To replace that, say so: --again" in again
    assert "Porto,7" in shops("quarantine", "list", "orders").stdout
    rows = {row["number"]: row for row in shops.json("quarantine", "list", "orders")}
    assert rows[int(numbers[True])]["payload"] == "Porto,seven"
    actions = shops.json("inspect", "orders", "--txid", "1")["actions"]
    reasons = [f"record {numbers[True]}: {why}" for why in ("a slip", "a slip", "it says 7")]
    assert [(each["action"], each["reason"]) for each in actions] == [("mend", reason) for reason in reasons]

    replay = ("quarantine", "replay", "orders", "--reason", "try them")
    refused = shops.refused(*replay, exit_code=TRY_AGAIN, **shops.airflow_away())
    assert "orders: 2 records left quarantine, for txid 2. But no run has started" in refused
    assert "Source: quarantine" in shops("inspect", "orders", "--txid", "2").stdout
    assert shops.json("run", "orders")["committed"] == [2]
    (left,) = shops.json("quarantine", "list", "orders")
    assert (left["txid"], left["is_raw"]) == (2, False)
    mended = home / "mended.json"
    mended.write_text('{"shop": "Porto", "cents": 5}\r\n')
    record = ("orders", "2", str(left["number"]))
    done = shops.json("quarantine", "mend", *record, "--reason", "a gift", "--payload-from", str(mended))
    assert (done["mended_by"], done["still_bad"], done["untried"]) == (f"{ME}, tidegate quarantine mend", None, None)
    replayed = shops.json("quarantine", "replay", "orders", "--txid", "2", "--reason", "once more", "--here")
    assert (replayed["replayed_txid"], replayed["records"], replayed["committed"]) == (3, 1, [3])
    assert _revenue(shops) == {"Lisbon": (2, 2240), "Porto": (3, 712)}
