"""The verbs retire and reinstate, with a real pipeline from end to end."""

import pytest

from tests.cli.conftest import CommandLine, write_file
from tidegate.commands.act.operator_verbs import operator

TRY_AGAIN = 75
ME = operator("retire").partition(",")[0]
WHY = ("--reason", "replaced by orders_by_hour")
ROWS = ("2013,1,1,517,2,UA,1545,EWR,IAH,1400", "2013,1,1,533,-4,UA,1714,LGA,IAH,1416")


@pytest.mark.promise("verb:retire", "verb:reinstate", "json:reinstate", "json:retire")
def test_a_retired_pipeline_is_refused_everywhere_and_goes_on_when_it_is_reinstated(shops: CommandLine) -> None:
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
