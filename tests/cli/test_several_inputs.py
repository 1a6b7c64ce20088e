"""The verbs of quarantine for a pipeline of several inputs, and look-ups of NULL."""

import json
from collections.abc import Callable

import pytest

from tests.cli.conftest import REPOSITORY, CommandLine, write_file
from tests.cli.deliveries import DELIVERIES

AT = "2026-01-01T00:00:0{}Z"


@pytest.fixture
def deliveries(tidegate: CommandLine, register: Callable[..., None]) -> CommandLine:
    """The command line with another package that provides the pipeline, registered too."""
    register(DELIVERIES)
    metadata = tidegate.settings.home / "authors" / "deliveries-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: deliveries\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[tidegate.pipelines]\ndeliveries = tests.cli.deliveries:DELIVERIES\n")
    tidegate.environment["PYTHONPATH"] = f"{metadata.parent}:{REPOSITORY}"
    return tidegate


@pytest.mark.soak
def test_records_of_several_inputs_are_listed_mended_and_replayed(deliveries: CommandLine) -> None:
    """By the verbs, each under its input's name; the price is that of the replay; NULL is looked up as a text stands for it."""
    home = deliveries.settings.home
    write_file(home, "prices/1.csv", "item,price", "nut,2", "bolt,3")
    write_file(home, "west/1.csv", "item,pieces,at", f"nut,10,{AT.format(1)}", f"bolt,ten,{AT.format(2)}")
    east = [{"item": None, "parts": 7, "at": AT.format(3)}, {"item": "nut", "parts": -5, "at": AT.format(4)}]
    write_file(home, "east/1.json", *map(json.dumps, east))
    assert deliveries.json("run", "deliveries")["committed"] == [1]

    listed = deliveries("quarantine", "list", "deliveries").stdout
    assert "west: 1.csv, line 3" in listed
    assert "east: 1.json, line 2" in listed
    rows = {row["origin"]: row for row in deliveries.json("quarantine", "list", "deliveries")}
    assert rows["east: 1.json, line 2"]["reason"] == "fails the check 'some'"
    (declared,) = (each for each in deliveries.json("pipelines") if each["pipeline"] == "deliveries")
    assert declared["checks"] == {"east: some": "parts > 0"}

    def mend(origin: str, payload: str, *more: str) -> dict[str, str | None]:
        record = ("quarantine", "mend", "deliveries", "1", str(rows[origin]["number"]))
        found: dict[str, str | None] = deliveries.json(*record, "--reason", "it says so", "--payload", payload, *more)
        return found

    assert "column pieces" in (mend("west: 1.csv, line 3", f"bolt,X,{AT.format(2)}")["still_bad"] or "")
    assert mend("west: 1.csv, line 3", f"bolt,10,{AT.format(2)}", "--again")["still_bad"] is None
    wrong = json.dumps({"item": "nut", "parts": 0, "at": AT.format(4)})
    assert mend("east: 1.json, line 2", wrong)["still_bad"] == "fails the check 'some'"
    right = json.dumps({"item": "nut", "parts": 5, "at": AT.format(4)})
    assert mend("east: 1.json, line 2", right, "--again") | {"mended_by": ""} == {
        **{"pipeline": "deliveries", "txid": 1, "number": rows["east: 1.json, line 2"]["number"]},
        **{"mended_by": "", "still_bad": None, "untried": None},
    }
    write_file(home, "prices/1.csv", "item,price", "nut,100", "bolt,3")
    replayed = deliveries.json("quarantine", "replay", "deliveries", "--reason", "mended", "--here")
    assert (replayed["replayed_txid"], replayed["records"], replayed["committed"]) == (2, 2, [2])
    shown = deliveries("inspect", "deliveries", "--txid", "2").stdout
    assert "Source: quarantine" in shown
    assert "of reference prices" in shown
    found = {
        row["item"]: (row["sent"], row["cents"]) for row in deliveries.json("inspect", "deliveries", "--state", "per_item")
    }
    assert found == {"nut": (2, 520), "bolt": (1, 30), None: (1, 0)}

    (null,) = deliveries.json("get", "deliveries", "price_history", "-", AT.format(3), "--null", "-")
    assert null["key"] == [None, AT.format(3)]
    assert (null["row"]["item"], null["row"]["price"], null["row"]["valid_to"]) == (None, None, None)
    nuts = deliveries.json("get", "deliveries", "price_history", "nut", AT.format(1), "nut", AT.format(4))
    assert [(row["row"]["price"], row["row"]["to_txid"]) for row in nuts] == [(2, 2), (100, None)]
    absent = deliveries("get", "deliveries", "per_item", "-")
    assert (absent.returncode, absent.stderr) == (1, "State per_item has no row for -.\n")
