"""With 100 pipelines and many txids in one of them, every answer is small."""

import json

import pytest

from tests.batches import Batches
from tests.page.conftest import Server, Visit
from tests.page.ledgers import PIPELINES, write_large_ledger
from tests.page.pipelines import CLICKS
from tidegate.state_store import StateStore

LARGE, TXIDS = "large_1", 2_000


@pytest.mark.promise("decision:0056")
def test_answers_are_small(server: Server, store: StateStore, visit: Visit) -> None:
    batches, admin = Batches(store, CLICKS), visit("admin")
    batches.plan("a run", 1)
    batches.seal(1)
    batches.commit(1)
    write_large_ledger(server.settings, txids=TXIDS, others=50)
    first = admin.json("/pipelines")
    assert (first["total"], len(first["pipelines"])) == (PIPELINES + 3, 50)
    assert [row["name"] for row in admin.json("/pipelines", search="ARGE_10")["pipelines"]] == ["large_10", "large_100"]
    assert admin.json("/pipelines", search="%")["total"] == 0

    in_order = admin.json("/pipelines", limit=200)["pipelines"]
    assert len({row["name"] for row in in_order}) == PIPELINES + 3
    severities = [row["why"]["severity"] for row in in_order]
    assert (severities[0], severities[-1]) == ("error", "ok")
    assert severities == sorted(severities, key=["error", "warning", "info", "ok"].index)
    worst = admin.json("/pipelines", limit=2)["pipelines"]
    assert [row["why"]["severity"] for row in worst] == severities[:2]
    assert [row["name"] for row in worst] != sorted(row["name"] for row in in_order)[:2]

    for path in ("", "/batches", "/timeline", "/quarantine", f"/batches/{TXIDS // 2}"):
        assert len(json.dumps(admin.json(f"/pipelines/{LARGE}{path}"))) < 100_000, path
    detail = admin.json(f"/pipelines/{LARGE}")
    assert (detail["opened"], detail["pending"], sum(detail["phases"].values())) == (TXIDS, 20, 20)
    assert [batch["txid"] for batch in admin.browse(f"/pipelines/{LARGE}/batches", "batches", "before", phase="skipped")] == [5]
