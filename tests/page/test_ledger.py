"""The page tells what the ledger says, in small answers however large that is, and acts as the command line does."""

import base64
import csv
import io
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.batches import Batches
from tests.page.conftest import Server, Visit, Visitor
from tests.page.ledgers import PIPELINES, write_large_ledger, write_rows
from tests.page.pipelines import CLICKS
from tests.sources.in_process import meanwhile
from tests.store import encode_metadata
from tidegate.state_store import StateStore

HOSTILE = (
    "<script>alert(1)</script>",
    "'; DROP TABLE state.per_page; --",
    'with "quotes", and commas',
    "two\r\nlines",
    "=HYPERLINK('http://evil.example')",
    "%00 %s %(page)s {0}",
    "",
    "\u202eright to left \U0001f98a",
)


@pytest.fixture
def clicks(store: StateStore) -> Batches:
    return Batches(store, CLICKS)


@pytest.fixture
def admin(visit: Visit) -> Visitor:
    return visit("admin")


@pytest.mark.promise("decision:0056")
def test_no_whole_number_of_an_input_is_rounded_by_a_browser(admin: Visitor, clicks: Batches) -> None:
    given = [2**53 - 1, 2**53, -(2**53), 1_764_080_000_123_456_789]
    shown = [2**53 - 1, *map(str, given[1:])]

    def metadata(numbers: list) -> dict:
        return {"files": [], "times": [numbers[3]], "partitions": {"0": {"from": numbers[0], "to": numbers[1:]}}}

    clicks.plan("an earlier run", 1)
    encoded = [encode_metadata(metadata(given))]
    (txid,) = clicks.store.open_batches(CLICKS.spec, "a run", [], clicks.store.last_opened("clicks"), encoded)
    batch = admin.json(f"/pipelines/clicks/batches/{txid}")
    assert (batch["source"], batch["has_next"], batch["may_act"]) == (metadata(shown), False, True)
    assert admin.json(f"/pipelines/clicks/batches/{txid - 1}")["has_next"]


def test_operators_act_on_the_page_and_the_ledger_knows_them(admin: Visitor, clicks: Batches, visit: Visit) -> None:
    """Four clicks skip once, and a pause is one though another operator resumes meanwhile. An invisible reason is none."""
    clicks.plan("an operator's run", 1)
    failed = admin.json("/pipelines/clicks")["committed"] + 1
    clicks.fail(failed)
    assert admin.act("clicks", "retry", txid=failed, reason=" it was <b>mended</b> ").json()["txids"] == [failed]
    assert admin.act("clicks", "pause", reason="\u200b\u2060 \u3164").json()["code"] == "USAGE_ERROR"
    clicks.store.pause("clicks", "other", "it is moved")
    with meanwhile(StateStore, "lag", lambda: clicks.store.resume("clicks", "other", "it was moved")):
        assert admin.act("clicks", "pause", reason="the disk is full").status_code == 200
    assert admin.act("clicks", "retry", reason="too early").json()["code"] == "PIPELINE_PAUSED"
    assert admin.act("clicks", "resume", reason="there is room").json()["run_needed"] is True
    clicks.fail(failed)
    users = [visit("admin") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        skipped = list(pool.map(lambda user: user.act("clicks", "skip", txid=failed, reason="lost"), users))
    assert [answer.status_code for answer in skipped] == [200] * 4
    actions = admin.json("/pipelines/clicks")["actions"]
    assert [(each["action"], each["txid"], each["owner"], each["reason"]) for each in actions[::-1]] == [
        ("retry", failed, "admin, page retry", "it was <b>mended</b>"),
        ("pause", None, "other", "it is moved"),
        ("resume", None, "other", "it was moved"),
        ("pause", None, "admin, page pause", "the disk is full"),
        ("resume", None, "admin, page resume", "there is room"),
        ("skip", failed, "admin, page skip", "lost"),
    ]
    assert admin.json("/pipelines/clicks")["committed"] == failed


SINCE = "clicks/batches?since="
# By requests about pipelines, the status of the answer.
SHAPES = {
    "click%00s": 404,
    "clicks%27%3BDROP TABLE tidegate.batch--/batches": 404,
    "clicks/states/per_page%22%3B--/rows": 404,
    "clicks/states/%00.csv": 404,
    "clicks/states/per_page/rows?after=WyJcdTAwMDAiLCAiMjAyNi0wMS0wMSJd": 422,
    "clicks/states/per_page/rows?limit=1000000": 422,
    "clicks/batches?error=%00": 422,
    "clicks/batches?error=%27 OR true--": 200,
    "clicks/batches?phase=none": 422,
    "clicks/batches?before=99999999999999999999": 422,
    f"{SINCE}0001-01-01T00:00:00%2B14:00": 422,
    f"{SINCE}2026-01-01T00:00:00": 422,
    f"{SINCE}2026-01-01T00:00:00%2B16:00": 422,
    f"{SINCE}2026-01-01T00:00:00%2B15:59": 200,
    f"{SINCE}2026-01-01T00:00:00Z": 200,
    "clicks/timeline?from=9&to=1": 422,
    "clicks/timeline?last=501": 422,
    "clicks/timeline?from=1&to=1000000000000000": 200,
    "clicks/quarantine?after=1-%00": 422,
    "clicks/quarantine?after=99999999999999999999-1": 422,
    "clicks/batches/99999999999999999999": 422,
    "clicks/quarantine/1/99999999999999999999": 422,
    "?search=%00": 200,
}


@pytest.mark.promise("limit:MOST_BATCHES")
def test_requests_of_any_shape_are_answered(admin: Visitor) -> None:
    answers = {path: admin.get(f"/api/pipelines{path if path[0] == '?' else f'/{path}'}") for path in SHAPES}
    assert {path: answer.status_code for path, answer in answers.items()} == SHAPES
    for answer in answers.values():
        assert answer.status_code == 200 or {"code", "message", "page"} == answer.json().keys()


def test_rows_come_as_they_are(server: Server, admin: Visitor) -> None:
    rows = [(text, f"2026-01-{day:02}", 2**53 + day, f"{day}.1234", 1) for day, text in enumerate(HOSTILE, start=1)]
    write_rows(server.settings, "clicks", "per_page", rows)
    as_shown = [[text, day, str(count), spent, str(txid)] for text, day, count, spent, txid in rows]
    expected = sorted(as_shown, key=lambda row: row[0].encode())
    assert admin.browse("/pipelines/clicks/states/per_page/rows", "rows", limit=3) == expected
    for row in expected:
        assert admin.json("/pipelines/clicks/states/per_page/rows", key=row[:2])["rows"] == [row]
    answer = admin.get("/api/pipelines/clicks/states/per_page.csv")
    assert list(csv.reader(io.StringIO(answer.text, newline="")))[1:] == expected
    assert answer.text.splitlines()[0] == "page,day,clicks,spent,txid"
    assert answer.headers["Content-Disposition"] == 'attachment; filename="clicks.per_page.csv"'
    for key in (["a"], ["a", "no date"], ["a", "2026-01-01", "b"], ["a\0", "2026-01-01"]):
        refused = admin.get("/api/pipelines/clicks/states/per_page/rows", key=key)
        assert (refused.status_code, refused.json()["code"]) == (422, "USAGE_ERROR"), key
    half, deep = (base64.urlsafe_b64encode(key).decode() for key in (b'["\\ud800", "2026-01-01"]', b"[" * 14_000))
    for token in ("x", "bm8=", "WyJhIl0=", "WyJhIiwgIm5vIGRhdGUiXQ==", "WzEsIDJd", half, deep):
        assert admin.get("/api/pipelines/clicks/states/per_page/rows", after=token).status_code == 422, token


@pytest.mark.promise("limit:MOST_KEYS_OF_A_REQUEST")
def test_many_rows_are_found_at_once_and_an_unchanged_state_is_not_sent_again(server: Server, admin: Visitor) -> None:
    path = "/tidegate/api/pipelines/clicks/states/per_page/rows"
    known = admin.json("/pipelines/clicks/states/per_page/rows", limit=2)
    found = admin.http.post(path, json={"keys": [*[row[:2] for row in known["rows"]], ["nowhere", "2026-01-01"]]})
    assert found.status_code == 200, found.text
    assert found.json() == {"txid": known["txid"], "columns": known["columns"], "rows": [*known["rows"], None]}
    first = admin.http.get(path)
    assert [len(first.headers.get_list(name)) for name in ("ETag", "Cache-Control")] == [1, 1]
    again = admin.http.get(path, headers={"If-None-Match": first.headers["ETag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
    assert admin.http.get(path, headers={"If-None-Match": '"another"'}).status_code == 200
    for wrong in ({"keys": [["a"]]}, {"keys": [["a", "no date"]]}, {"keys": [["a", "2026-01-01"]] * 1001}, {}):
        assert admin.http.post(path, json=wrong).status_code == 422, wrong


def test_rows_without_a_key_have_their_place(server: Server, admin: Visitor) -> None:
    keys = [(page, shop) for page in ("", "a", None) for shop in (1, 2, None)]
    rows = [(page, shop, number, None, None, number) for number, (page, shop) in enumerate(keys, start=1)]
    write_rows(server.settings, "orphan", "per_orphan", rows)
    for limit in (1, 2):
        assert [tuple(row[:2]) for row in admin.browse("/pipelines/orphan/states/per_orphan/rows", "rows", limit=limit)] == keys


LARGE, TXIDS = "large_1", 2_000


@pytest.mark.promise("decision:0056")
def test_answers_are_small(server: Server, clicks: Batches, admin: Visitor) -> None:
    """With 100 pipelines and many txids in one of them."""
    clicks.plan("a run", 1)
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
