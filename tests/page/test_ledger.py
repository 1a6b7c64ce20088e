"""The page tells what the ledger says, acts as the command line does, and comes back when Postgres does."""

import base64
import csv
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import datetime

import httpx
import psycopg2
import pytest

from tests import in_process, steps
from tests.batches import Batches
from tests.page.conftest import ACTION, Server, Visit, Visitor
from tests.page.ledgers import as_owner, write_rows
from tests.page.pipelines import CLICKS, ORPHAN
from tests.statements import execute
from tests.store import AirflowTry, Request, Tracked, encode_metadata
from tidegate.stack.components import server_process as components
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
    """The batches of pipeline clicks, which the tests of this file share."""
    return Batches(store, CLICKS)


@pytest.fixture
def admin(visit: Visit) -> Visitor:
    return visit("admin")


def status(server: Server, pipeline: str = "clicks") -> dict:
    done = in_process.run(["status", "--json"], server.environment, server.home)
    assert done.returncode == 0, done.stderr
    # Airflow's app runs in threads of this process, and may log to the same output meanwhile.
    found: dict = json.JSONDecoder().raw_decode(done.stdout, done.stdout.index("{"))[0]
    return next(each for each in found["pipelines"] if each["pipeline"] == pipeline)


def browsed(admin: Visitor, path: str, what: str, limit: int, token: str = "after") -> list:
    """Return all that a list has, by following its pages."""
    seen: list = []
    next_page = None
    while next_page is not None or not seen:
        page = admin.json(path, limit=limit, **{token: next_page})
        seen, next_page = seen + page[what], page["next"]
    return seen


def actions_of(admin: Visitor, pipeline: str = "clicks") -> list[tuple]:
    actions = admin.json(f"/pipelines/{pipeline}")["actions"]
    return [(each["action"], each["txid"], each["owner"], each["reason"]) for each in reversed(actions)]


def test_the_page_the_command_line_and_the_ledger_agree(server: Server, admin: Visitor, clicks: Batches) -> None:
    run = "manual__2026-11-25T10:00:00+00:00"
    first = clicks.plan(run, 20)[0]
    for txid in (first, first + 1):
        clicks.seal(txid, rows=10, airflow=AirflowTry(run, "batch.process", 2))
        clicks.commit(txid)
    clicks.fail(first + 2)
    sums = (2**62 + 1, -(2**62) - 1)
    attempt = clicks.begin(first + 3, AirflowTry(run, f"batch.process of txid {first}", 1))
    clicks.store.seal(attempt, [], Tracked(10, sums[0], transformed_rows=10, transformed_hash_sum=sums[1]))
    clicks.begin(first + 4)

    (row,) = (each for each in admin.json("/pipelines")["pipelines"] if each["name"] == "clicks")
    lag = status(server)
    for name in ("committed", "opened", "pending", "quarantined"):
        assert row[name] == lag[name], name
    assert row["phases"] == {"planned": 15, "processing": 1, "failed": 0, "halted": 1, "processed": 1}
    assert (row["why"]["code"], row["why"]["txid"], row["why"]["action"]["verb"]) == ("HALTED", first + 2, "retry")
    assert row["rows_per_second"] > 0
    assert row["description"] == CLICKS.description
    in_sql = as_owner(
        server.settings, "SELECT txid, phase, attempt FROM tidegate.batches WHERE pipeline = 'clicks' ORDER BY 1 DESC"
    )
    listed = admin.json("/pipelines/clicks/batches", limit=500)["batches"]
    assert [(each["txid"], each["phase"], each["attempt"]) for each in listed] == in_sql
    timeline = admin.json("/pipelines/clicks/timeline", last=500)
    assert [(each["txid"], each["phase"]) for each in reversed(timeline["batches"])] == [each[:2] for each in in_sql]
    assert timeline["cursor"] == lag["committed"]
    batch = admin.json(f"/pipelines/clicks/batches/{first + 3}")
    assert [cause["code"] for cause in batch["why"]["causes"]] == ["WAITS_FOR_TXID", "HALTED"]
    assert batch["links"]["logs"][0]["url"].endswith("/tasks/batch.process/mapped/0?try_number=1")
    (shown,) = batch["attempts"]
    assert (shown["source_hash_sum"], shown["transformed_hash_sum"]) == tuple(map(str, sums)), "no number has all digits"
    assert batch["links"]["dag_run"] == "/dags/clicks/runs/manual__2026-11-25T10%3A00%3A00%2B00%3A00"
    for name, txids in {"halted": [first + 2], "processed": [first + 3], "skipped": []}.items():
        found = admin.json("/pipelines/clicks/batches", phase=name)["batches"]
        assert [each["txid"] for each in found] == txids


@pytest.mark.promise("decision:0056")
def test_no_whole_number_of_an_input_is_rounded_by_a_browser(admin: Visitor, clicks: Batches) -> None:
    given = [2**53 - 1, 2**53, -(2**53), 1_764_080_000_123_456_789]
    shown = [2**53 - 1, *map(str, given[1:])]

    def metadata(numbers: list) -> dict:
        return {"files": [], "times": [numbers[3]], "partitions": {"0": {"from": numbers[0], "to": numbers[1:]}}}

    clicks.plan("an earlier run", 1)
    encoded = [encode_metadata(metadata(given))]
    opened = clicks.store.open_batches(CLICKS.spec, "a run", [], clicks.store.last_opened("clicks"), encoded)
    assert opened is not None
    batch = admin.json(f"/pipelines/clicks/batches/{opened[0]}")
    assert (batch["source"], batch["has_next"], batch["may_act"]) == (metadata(shown), False, True)
    assert admin.json(f"/pipelines/clicks/batches/{opened[0] - 1}")["has_next"]


def test_a_plan_that_meets_a_lock_hides_no_batch_that_needs_a_person(server: Server, admin: Visitor, clicks: Batches) -> None:
    """Its housekeeping is left for later, so the page does not say that planning has failed, or to start Postgres."""
    failed = admin.json("/pipelines/clicks")["committed"] + 1
    (server.home / "clicks").mkdir()
    with closing(psycopg2.connect(**server.settings.conninfo(user="postgres"))) as holder, holder.cursor() as cursor:
        cursor.execute("LOCK TABLE tidegate.attempt IN EXCLUSIVE MODE")
        assert failed in steps.plan(server.settings, CLICKS, run_id="manual__beside_a_lock")
    clicks.fail(failed)
    causes = admin.json("/pipelines/clicks")["causes"]
    assert [(cause["code"], cause["txid"]) for cause in causes] == [("HALTED", failed)]


def test_operators_act_on_the_page_and_the_ledger_knows_them(
    server: Server, admin: Visitor, clicks: Batches, store: StateStore
) -> None:
    failed = admin.json("/pipelines/clicks")["committed"] + 1
    before = actions_of(admin)
    announced = admin.json("/pipelines/clicks/actions/retry", txid=failed)
    assert (announced["allowed"], announced["command"]) == (True, f"tidegate retry clicks {failed} --reason ...")
    assert admin.act("clicks", "retry", txid=failed, reason=" it was <b>mended</b> ").json()["txids"] == [failed]
    assert admin.act("clicks", "pause", reason="the disk is full").status_code == 200
    refused = admin.act("clicks", "retry", reason="too early")
    assert (refused.status_code, refused.json()["code"]) == (409, "PIPELINE_PAUSED")
    assert admin.json("/pipelines/clicks")["paused"]["by"] == "admin, page pause"
    assert admin.json("/pipelines/orphan")["why"]["code"] == "IDLE"
    error = f"SOURCE_UNREADABLE: {HOSTILE[0]} is {HOSTILE[-1]}."
    for run_id in ("manual__1", "manual__2"):
        assert store.fail_plan("orphan", store.begin_plan("orphan", run_id), run_id, error)
    listed = {row["name"]: row["why"] for row in admin.json("/pipelines")["pipelines"] if row["name"] != "broken"}
    assert list(listed) == ["orphan", "clicks"], "what a person has paused comes after what waits"
    why = listed["orphan"]
    assert (why["code"], why["error"], why["severity"]) == ("PLAN_FAILED", "SOURCE_UNREADABLE", "error")
    assert why["sentence"] == f"Planning has failed 2 times (manual__2): {error}"
    assert why["action"] == {"verb": "trigger", "txid": None}
    assert datetime.fromisoformat(why["since"]) == datetime.fromisoformat(status(server, "orphan")["plans_failing_since"])
    of_orphan = admin.json("/pipelines/orphan")
    assert (of_orphan["why"], of_orphan["causes"]) == (why, [why])
    assert store.open_batches(ORPHAN.spec, "manual__3", [], None, []) == []
    assert admin.json("/pipelines/orphan")["why"]["code"] == "IDLE"
    assert admin.act("clicks", "resume", reason="there is room").json()["run_needed"] is True

    clicks.fail(failed)
    waits = admin.json("/pipelines/clicks/actions/skip", txid=failed)
    assert "leaves all its rows out of the states, permanently. That happens now" in waits["will"]
    skipped = admin.act("clicks", "skip", txid=failed, reason="it cannot be mended")
    assert (skipped.status_code, skipped.json()["txids"]) == (200, [failed])
    assert "That" not in admin.json("/pipelines/clicks/actions/skip", txid=failed)["will"]

    assert actions_of(admin)[len(before) :] == [
        ("retry", failed, "admin, page retry", "it was <b>mended</b>"),
        ("pause", None, "admin, page pause", "the disk is full"),
        ("resume", None, "admin, page resume", "there is room"),
        ("skip", failed, "admin, page skip", "it cannot be mended"),
    ]
    assert status(server)["committed"] == failed
    redo = admin.json("/pipelines/clicks/actions/redo", txid=failed)
    assert (redo["allowed"], "not opaque" in redo["refusal"]) == (False, True)


def test_what_the_ledger_refuses_is_said(admin: Visitor, clicks: Batches) -> None:
    """Malformed requests, batches that may not be skipped, code that cannot be imported or does not exist."""
    committed = admin.json("/pipelines/clicks")["committed"]
    before = actions_of(admin)
    refusals = {
        ("clicks", "skip", committed + 1, "a test"): (409, "RANGE_REFUSED"),
        ("clicks", "skip", 10**9, "a test"): (404, "UNKNOWN_BATCH"),
        ("clicks", "skip", None, "a test"): (422, "MALFORMED_REQUEST"),
        ("clicks", "skip", 2**70, "a test"): (422, "MALFORMED_REQUEST"),
        ("clicks", "pause", None, "   "): (422, "USAGE_ERROR"),
        ("clicks", "pause", None, "x" * 2001): (422, "MALFORMED_REQUEST"),
        ("clicks", "pause", None, "x" * 25_000_000): (413, "TOO_LONG"),
        ("clicks", "destroy", None, "a test"): (422, "MALFORMED_REQUEST"),
        ("broken", "skip", 1, "a test"): (409, "NOT_LOADED"),
        ("orphan", "replay", None, "a test"): (409, "NOT_LOADED"),
    }
    for (pipeline, verb, txid, reason), expected in refusals.items():
        answer = admin.act(pipeline, verb, txid=txid, reason=reason)
        assert (answer.status_code, answer.json()["code"]) == expected, (verb, txid, reason[:20], answer.text[:300])
    assert actions_of(admin) == before
    assert admin.act("broken", "pause").status_code == admin.act("broken", "resume").status_code == 200
    for path in ("clicks/batches/99999", "clicks/batches/0", "clicks/states/none/rows", "none"):
        assert admin.get(f"/api/pipelines/{path}").status_code == 404, path
    assert admin.act("none", "pause").status_code in (404, 503)


SHAPES = {
    "pipelines/click%00s": 404,
    "pipelines/clicks%27%3BDROP TABLE tidegate.batch--": 404,
    "pipelines/clicks%27%3BDROP TABLE tidegate.batch--/batches": 404,
    "pipelines/clicks/states/per_page%22%3B--/rows": 404,
    "pipelines/clicks/states/%00.csv": 404,
    "pipelines/clicks/states/per_page/rows?after=WyJcdTAwMDAiLCAiMjAyNi0wMS0wMSJd": 422,
    "pipelines/clicks/states/per_page/rows?limit=1000000": 422,
    "pipelines/clicks/batches?error=%00": 422,
    "pipelines/clicks/batches?error=%27 OR true--": 200,
    "pipelines/clicks/batches?phase=none": 422,
    "pipelines/clicks/batches?before=99999999999999999999": 422,
    "pipelines/clicks/batches?since=0001-01-01T00:00:00%2B14:00": 422,
    "pipelines/clicks/batches?since=2026-01-01T00:00:00": 422,
    "pipelines/clicks/batches?since=2026-01-01T00:00:00%2B16:00": 422,
    "pipelines/clicks/batches?since=2026-01-01T00:00:00%2B15:59": 200,
    "pipelines/clicks/batches?since=2026-01-01T00:00:00Z": 200,
    "pipelines/clicks/timeline?from=9&to=1": 422,
    "pipelines/clicks/timeline?last=501": 422,
    "pipelines/clicks/timeline?from=1&to=1000000000000000": 200,
    "pipelines/clicks/quarantine?after=1-%00": 422,
    "pipelines/clicks/quarantine?after=99999999999999999999-1": 422,
    "pipelines/clicks/batches/99999999999999999999": 404,
    "pipelines/clicks/quarantine/1/99999999999999999999": 404,
    "pipelines?search=%00": 200,
}


@pytest.mark.promise("limit:MOST_BATCHES")
def test_requests_of_any_shape_are_answered(admin: Visitor) -> None:
    """What makes no sense is refused in the usual shape, and never fails."""
    answers = {path: admin.get(f"/api/{path}") for path in SHAPES}

    assert {path: answer.status_code for path, answer in answers.items()} == SHAPES
    for answer in answers.values():
        assert answer.status_code == 200 or {"code", "message", "page"} == answer.json().keys()


def test_a_double_click_skips_once(admin: Visitor, clicks: Batches, visit: Visit) -> None:
    committed = admin.json("/pipelines/clicks")["committed"]
    later = committed + 3
    clicks.fail(later)
    users = [visit("admin") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda user: user.act("clicks", "skip", txid=later, reason="a double click"), users))

    assert [answer.status_code for answer in answers] == [200] * 4
    assert [action for action in actions_of(admin) if action[3] == "a double click"] == [
        ("skip", later, "admin, page skip", "a double click")
    ]


@pytest.mark.soak
def test_pages_hold_every_batch_once_while_others_commit(admin: Visitor, store: StateStore) -> None:
    batches = Batches(store, ORPHAN)
    batches.plan("a long run", 40)
    ended = threading.Event()

    def commit() -> None:
        for txid in range(1, 21):
            batches.seal(txid)
            batches.commit(txid)
            if txid % 10 == 0:
                batches.plan(f"a run after {txid}", 5)
        ended.set()

    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(commit)
        while True:
            seen = [each["txid"] for each in browsed(admin, "/pipelines/orphan/batches", "batches", 7, "before")]
            assert seen == list(range(seen[0], 0, -1))
            row = admin.json("/pipelines/orphan")
            assert row["pending"] == row["opened"] - row["committed"] == sum(row["phases"].values())
            if ended.is_set() or committing.done():
                break
        committing.result()
    assert admin.json("/pipelines/orphan")["committed"] == 20


def test_rows_come_as_they_are(server: Server, admin: Visitor) -> None:
    rows = [(text, f"2026-01-{day:02}", 2**53 + day, f"{day}.1234", 1) for day, text in enumerate(HOSTILE, start=1)]
    write_rows(server.settings, "clicks", "per_page", rows)
    as_shown = [[text, day, str(count), spent, str(txid)] for text, day, count, spent, txid in rows]
    expected = sorted(as_shown, key=lambda row: row[0].encode())

    assert browsed(admin, "/pipelines/clicks/states/per_page/rows", "rows", 3) == expected
    for row in expected:
        found = admin.json("/pipelines/clicks/states/per_page/rows", key=row[:2])["rows"]
        assert found == [row]
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
    keys = [row[:2] for row in known["rows"]]
    found = admin.http.post(path, json={"keys": [*keys, ["nowhere", "2026-01-01"]]})
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
    keys = [(page, shop) for page in ("", "a", "b", None) for shop in (1, 2, None)]
    rows = [(page, shop, number, None, None, number) for number, (page, shop) in enumerate(keys, start=1)]
    write_rows(server.settings, "orphan", "per_orphan", rows)

    for limit in (1, 2, 5, 50):
        found = browsed(admin, "/pipelines/orphan/states/per_orphan/rows", "rows", limit)
        assert [tuple(row[:2]) for row in found] == keys
    wanted = [[page, None if shop is None else str(shop)] for page, shop in keys]
    path = "/tidegate/api/pipelines/orphan/states/per_orphan/rows"
    found = admin.http.post(path, json={"keys": [*wanted, [None, "9"]]}).json()["rows"]
    assert [row and tuple(row[:2]) for row in found] == [*keys, None]
    lines = admin.get("/api/pipelines/orphan/states/per_orphan.csv").text.split("\r\n")
    assert (lines[1], lines[3], lines[-2]) == ('"",1,1,1', '"",,3,3', ",,12,12")


@pytest.mark.soak
def test_downloads_are_streamed_and_given_up(server: Server, admin: Visitor) -> None:
    write = "INSERT INTO state.per_page SELECT repeat('x', 900) || n, '2030-01-01', n, 0, 1 FROM generate_series(1, 20000) n"
    as_owner(server.settings, f"SET LOCAL tidegate.writer = 'clicks'; {write}")
    path = "/tidegate/api/pipelines/clicks/states/per_page.csv"

    def snapshots() -> int:
        query = """SELECT count(*) FROM pg_stat_activity
                   WHERE usename = 'tidegate_reader' AND xact_start IS NOT NULL AND datname = current_database()"""
        return execute(server.settings.conninfo(user="postgres"), query)[0][0]

    kept = []  # httpx ends a download whose iterator is forgotten

    def begin(stack: ExitStack) -> int:
        answer = stack.enter_context(admin.http.stream("GET", path, headers={"Accept-Encoding": "identity"}))
        kept.append(answer.iter_raw())
        next(kept[-1])
        return answer.status_code

    for _ in range(2):
        with ExitStack() as reading:
            assert [begin(reading) for _ in range(3)] == [200, 200, 503]
            assert snapshots() == 2
        assert components.wait_until(lambda: snapshots() == 0, 60), "a download holds its snapshot"
    assert "Traceback" not in server.log()
    whole = admin.http.get(path)
    assert (whole.status_code, whole.text.count("\r\n")) == (200, 20_000 + len(HOSTILE) + 1 + 1)


BAD_RECORDS = """
INSERT INTO tidegate.quarantine (pipeline, txid, number, reason, origin, payload, is_raw)
SELECT 'clicks', %s, n, '<b>bad</b>', 'a.csv:' || n, CASE n WHEN 1 THEN repeat('x', 50000) ELSE 'a;' || n END, true
FROM generate_series(1, 12) n
"""


def test_bad_records_are_read_mended_and_replayed(server: Server, admin: Visitor, clicks: Batches) -> None:
    txid = admin.json("/pipelines/clicks")["committed"]
    as_owner(server.settings, BAD_RECORDS, [txid])
    page = admin.json("/pipelines/clicks/quarantine", limit=5)
    assert (page["total"], page["by_txid"]) == (12, [[txid, 12]])
    seen = browsed(admin, "/pipelines/clicks/quarantine", "records", 5)
    assert [record["number"] for record in seen] == list(range(1, 13))
    assert (len(seen[0]["payload"]), seen[0]["is_cut"], seen[1]["is_cut"]) == (10_000, True, False)
    assert len(admin.json(f"/pipelines/clicks/quarantine/{txid}/1")["payload"]) == 50_000
    path = f"/tidegate/api/pipelines/clicks/quarantine/{txid}/2"

    def mend(**body: object) -> int:
        return admin.http.post(path, json=body, headers=ACTION).status_code

    assert mend(payload="a,2", reason="a typing error") == 200
    assert (mend(payload="a,3", reason="again"), mend(payload="a,3", reason="again", again=True)) == (409, 200)
    assert (mend(payload="", reason="empty"), mend(payload="a", reason=" ")) == (422, 422)
    mended = admin.json(f"/pipelines/clicks/quarantine/{txid}/2")
    assert (mended["mended_payload"], mended["mended_by"]) == ("a,3", "admin, page mend")
    opened = admin.json("/pipelines/clicks")["opened"]
    will = admin.json("/pipelines/clicks/actions/replay", txid=txid)["will"]
    assert will.startswith(f"12 records leave the quarantine of clicks {txid}, as a batch of their own after txid {opened}.")
    assert admin.act("clicks", "replay", txid=txid).json()["txids"] == [opened + 1]
    assert admin.json("/pipelines/clicks")["quarantined"] == 0
    assert actions_of(admin)[-1] == ("replay", opened + 1, "admin, page replay", "a test")


def test_what_checks_found_and_set_aside_is_shown(server: Server, admin: Visitor, clicks: Batches) -> None:
    txid = admin.json("/pipelines/clicks")["committed"]
    before = admin.json("/pipelines/clicks/quarantine", txid=txid)
    statement = (
        "INSERT INTO tidegate.quarantine (pipeline, txid, number, state, reason, origin, payload, is_raw)"
        " VALUES ('clicks', %s, 100, 'total', 'too many', 'state total', '{}', false)"
    )
    as_owner(server.settings, statement, [txid])
    found = "INSERT INTO tidegate.check_result (pipeline, txid, name, found) VALUES ('clicks', %s, %s, %s)"
    for name, what in (("few", None), ("usual", "half as many rows as usual")):
        as_owner(server.settings, found, [txid, name, what])

    after = admin.json("/pipelines/clicks/quarantine", txid=txid)
    assert (after["total"], after["set_aside"]) == (before["total"], before["set_aside"] + 1)
    assert [record["state"] for record in after["records"] if record["number"] == 100] == ["total"]
    batch = admin.json(f"/pipelines/clicks/batches/{txid}")
    assert (batch["quarantined"], batch["set_aside"]) == (after["total"], after["set_aside"])
    assert batch["checks"] == [{"name": "few", "found": None}, {"name": "usual", "found": "half as many rows as usual"}]


def test_a_retired_pipeline_is_in_no_list(server: Server, admin: Visitor) -> None:
    token = {"Authorization": f"Bearer {server.settings.metrics_token_file.read_text()}"}

    def listed() -> tuple[bool, bool]:
        scraped = httpx.get(f"{server.url}/tidegate/metrics", headers=token, timeout=60).text
        return ORPHAN.name in [each["name"] for each in admin.json("/pipelines")["pipelines"]], f'"{ORPHAN.name}"' in scraped

    def rows() -> list:
        return admin.json(f"/pipelines/{ORPHAN.name}/states/per_orphan/rows")["rows"]

    assert listed() == (True, True)
    before = rows()
    with StateStore.connect(server.settings, user=server.settings.pg_owner) as owner:
        owner.retire(ORPHAN.name, Request("anna", "nobody needs it"))
        try:
            assert listed() == (False, False)
            gone = admin.get(f"/api/pipelines/{ORPHAN.name}")
            assert (gone.status_code, gone.json()["code"]) == (410, "PIPELINE_RETIRED")
            assert "orphan was retired by anna on " in gone.json()["message"]
            assert admin.act(ORPHAN.name, "pause").status_code == 410
            assert rows() == before
        finally:
            owner.reinstate(ORPHAN.name, "anna", "the test is over")
    assert listed() == (True, True)


def test_the_page_comes_back_with_postgres(server: Server, visit: Visit, admin: Visitor) -> None:
    token = admin.http.cookies["_token"]
    program = visit()
    program.http.headers["Authorization"] = f"Bearer {token}"
    assert program.get("/api/pipelines").status_code == 200
    server.postgres.close()
    try:
        away = [program.get("/api/pipelines").status_code for _ in range(3)]
        assert all(status >= 500 for status in away)
    finally:
        server.postgres.open()

    assert [visitor.get("/api/pipelines").status_code for visitor in (program, admin)] == [200, 200]
