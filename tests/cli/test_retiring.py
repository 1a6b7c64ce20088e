"""The verbs retire and reinstate, with a real pipeline from end to end."""

from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine, write_file, write_flights
from tests.store import encode_metadata
from tidegate.commands.act.operator_verbs import operator
from tidegate.jobs.pipelines import flights
from tidegate.state_store import StateStore

TRY_AGAIN = 75
ME = operator("retire").partition(",")[0]
WHY = ("--reason", "replaced by orders_by_hour")
ROWS = ("2013,1,1,517,2,UA,1545,EWR,IAH,1400", "2013,1,1,533,-4,UA,1714,LGA,IAH,1416")


@pytest.mark.promise("verb:retire", "verb:reinstate", "json:reinstate", "json:retire")
def test_a_retired_pipeline_is_refused_everywhere_and_goes_on_when_it_is_reinstated(shops: CommandLine) -> None:
    """Its state in the end is that of a pipeline that was never retired."""
    home = shops.settings.home
    write_file(home, "orders/1.csv", "shop,cents", "Lisbon,1250", "Porto,0", ",5")
    assert shops.json("run", "orders")["committed"] == [1]

    unconfirmed = shops.refused("retire", "orders", *WHY)
    assert unconfirmed.startswith("tidegate: orders would be retired at txid 1: no batch of it would count any more. 1 bad")
    assert "Its states stay as tables that can be read: revenue, revenue_changes, sale. Add --yes to do it." in unconfirmed
    assert [row["pipeline"] for row in shops.json("status")["pipelines"]] == ["flights", "orders", "visits"]

    done = shops.json("retire", "orders", *WHY, "--yes")
    assert (done["already"], done["committed"], done["quarantined"], done["staging_dropped"]) == (False, 1, 1, 1)
    assert (done["retired_by"], done["retired_reason"]) == (f"{ME}, tidegate retire", "replaced by orders_by_hour")
    again = shops("retire", "orders", "--reason", "once more", "--yes")
    assert (again.returncode, again.stdout) == (0, "")
    assert f"orders was retired already, on {done['retired_at'][:10]}" in again.stderr

    write_file(home, "orders/2.csv", "shop,cents", "Lisbon,1000")
    for arguments in (
        ("run", "orders"),
        ("trigger", "orders"),
        ("backfill", "orders", "--from-txid", "1", "--to-txid", "2"),
        ("retry", "orders"),
        ("redo", "orders", "1", "--reason", "wrong", "--yes"),
        ("prune", "orders", "revenue", "--keep", "0", "--yes"),
        ("pause", "orders", "--reason", "a move"),
        ("resume", "orders"),
        ("quarantine", "replay", "orders", "--reason", "fixed"),
        ("quarantine", "mend", "orders", "1", "1", "--reason", "fixed", "--payload", "Porto,7"),
    ):
        refused = shops.refused(*arguments)
        assert f"orders was retired by {ME}, tidegate retire on " in refused
        assert refused.endswith("More: tidegate error PIPELINE_RETIRED\n")

    status = shops.json("status")
    assert [row["pipeline"] for row in status["pipelines"]] == ["flights", "visits"]
    assert [(row["pipeline"], row["committed"]) for row in status["retired"]] == [("orders", 1)]
    assert "Retired: orders. When and why: tidegate why orders" in shops("status").stderr
    assert "orders was retired by" in shops("why", "orders").stdout
    assert shops.json("inspect", "orders")[0]["phase"] == "committed"
    assert shops.json("get", "orders", "revenue", "Lisbon")[0]["row"]["cents"] == 1250
    (null,) = shops.json("get", "orders", "revenue", "-", "--null", "-")
    assert (null["key"], null["row"]["cents"]) == ([None], 5)
    migrated = shops.json("migrate")
    assert list(migrated["retired"]) == ["orders"]
    assert "Pipeline orders is declared, and left out" in shops("migrate").stderr

    assert shops.json("reinstate", "orders") == {"pipeline": "orders", "retired": False, "already": False}
    assert shops.json("reinstate", "orders") == {"pipeline": "orders", "retired": False, "already": True}
    assert shops.json("run", "orders")["committed"] == [2]
    revenue = {row["shop"]: (row["orders"], row["cents"]) for row in shops.json("inspect", "orders", "--state", "revenue")}
    assert revenue == {"Lisbon": (2, 2250), None: (1, 5)}
    actions = shops.json("inspect", "orders", "--txid", "2")["actions"]
    assert [action["action"] for action in actions] == ["retire", "reinstate"]


def test_a_pipeline_whose_code_is_gone_is_retired(shops: CommandLine) -> None:
    """That is the usual case of a renamed one; its states may go, too."""
    write_file(shops.settings.home, "orders/1.csv", "shop,cents", "Lisbon,1250")
    assert shops.json("run", "orders")["committed"] == [1]
    points = Path(shops.environment["PYTHONPATH"].partition(":")[0]) / "shop-1.dist-info" / "entry_points.txt"
    points.write_text("".join(line for line in points.read_text().splitlines(keepends=True) if not line.startswith("orders")))
    assert "There is no pipeline orders" in shops("inspect", "orders").stderr
    cause = shops.json("why", "orders")["causes"][0]
    assert cause["code"] == "IDLE"

    unconfirmed = shops.refused("retire", "orders", "--drop-states", *WHY)
    assert "Its states would be dropped permanently: revenue, revenue_changes, sale." in unconfirmed
    done = shops.json("retire", "orders", "--drop-states", *WHY, "--yes")
    assert (done["states"], done["dropped"]) == ([], ["revenue", "revenue_changes", "sale"])
    assert shops.json("why", "orders")["causes"][0]["code"] == "RETIRED"
    assert shops.json("retire", "orders", "--drop-states", *WHY, "--yes")["dropped"] == []
    refused = shops.refused("reinstate", "orders")
    assert "orders cannot be reinstated: its states were dropped (revenue, revenue_changes, sale)." in refused


def test_what_is_left_undone_is_said(tidegate: CommandLine, store: StateStore) -> None:
    """Opened batches that will never count; a pipeline at work is not retired at all."""
    write_flights(tidegate.settings.home, 1, *ROWS)
    assert tidegate.json("run", "flights")["committed"] == [1]
    with StateStore.connect(tidegate.settings, user=tidegate.settings.pg_owner) as owner, owner.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE tidegate.batch SET awaits_ack = true")
    write_flights(tidegate.settings.home, 2, *ROWS)
    assert store.open_batches(
        flights.PIPELINE.spec, "r", [], store.last_opened("flights"), [encode_metadata({"files": []})] * 2
    )
    store.start_attempt(flights.PIPELINE.spec, 2, "another process")
    for yes in ([], ["--yes"]):
        refused = tidegate.refused("retire", "flights", *WHY, *yes, exit_code=TRY_AGAIN)
        assert "flights is at work: attempt 1 at txid 2, by another process." in refused
    with StateStore.connect(tidegate.settings, user=tidegate.settings.pg_owner) as owner, owner.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE tidegate.attempt SET seen_at = now() - interval '1 hour'")
    said = tidegate("retire", "flights", *WHY, "--yes").stderr
    assert said.startswith(
        "flights is retired at txid 1. 2 opened batches will never count. The source has not had its ack for 1 batch"
    )
    assert "Take its files away: the pipeline and its Dag. To let it go on where it stood: tidegate reinstate flights" in said
