"""What one user's request may cost the others: each route has its own limits."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg2
import pytest

from tests.page.conftest import ACTION, PATIENCE_SECONDS, Server, Visit, Visitor
from tests.page.ledgers import write_rows
from tests.statements import execute
from tests.store import state_rows
from tidegate.page.access import MOST_REQUESTS
from tidegate.stack.components.server_process import wait_until

ROWS = "/tidegate/api/pipelines/clicks/states/per_page/rows"


@pytest.fixture
def viewer(visit: Visit) -> Visitor:
    return visit("viewer")


BODIES = [
    (json.dumps({"keys": [[1] * 300_000]}), 422),
    (json.dumps({"keys": [[1]] * 200_000}), 422),
    (json.dumps({"keys": [["a"]] * 1001}), 422),
    ("[" * 500_000, 422),
    ("\0" * 1000, 422),
    (" " * 2_000_000, 413),
]


@pytest.mark.promise("limit:MOST_BYTES")
def test_a_wrong_body_is_refused_with_a_short_answer(viewer: Visitor) -> None:
    for content, status in BODIES:
        answer = viewer.http.post(ROWS, content=content)
        assert (answer.status_code, len(answer.text) < 1000) == (status, True), content[:20]


@pytest.mark.promise("limit:PAGE_CHARACTERS")
def test_rows_of_keys_are_no_longer_than_a_page(server: Server, viewer: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if one key is asked for many times; a single row may be longer."""
    write_rows(server.settings, "clicks", "per_page", [("a long one", "2026-02-01", 1, "1.0000", 1)])
    key = viewer.json("/pipelines/clicks/states/per_page/rows", limit=1)["rows"][0][:2]
    monkeypatch.setattr(state_rows, "PAGE_CHARACTERS", 5)
    assert viewer.http.post(ROWS, json={"keys": [key]}).json()["rows"][0][:2] == key
    refused = viewer.http.post(ROWS, json={"keys": [key] * 400})
    assert (refused.status_code, refused.json()["code"]) == (422, "USAGE_ERROR")
    assert "over 5 characters" in refused.json()["message"]


@pytest.mark.promise("limit:MOST_REQUESTS")
def test_many_requests_of_one_user_leave_room_for_others(server: Server, viewer: Visitor, visit: Visit) -> None:
    """They would take all threads of the api-server, and all connections of the page: here, while a table is locked."""
    waiting = """SELECT count(*) FROM pg_stat_activity WHERE usename = 'tidegate_reader' AND wait_event_type = 'Lock'
                 AND datname = current_database()"""

    def at_work() -> int:
        return execute(server.settings.conninfo(user="postgres"), waiting)[0][0]

    admin = visit("admin")
    with ThreadPoolExecutor(60) as many, closing(psycopg2.connect(**server.settings.conninfo(user="postgres"))) as holder:
        holder.cursor().execute("LOCK TABLE state.per_page IN ACCESS EXCLUSIVE MODE")
        asked = [many.submit(viewer.get, "/api/queries/of_both") for _ in range(60)]
        assert wait_until(lambda: at_work() >= MOST_REQUESTS, PATIENCE_SECONDS)
        assert {row["name"] for row in admin.json("/pipelines")["pipelines"]} >= {"clicks", "orphan"}
        assert (at_work(), [each for each in asked if each.done()]) == (MOST_REQUESTS, [])
        holder.rollback()
        assert {each.result().status_code for each in asked} == {200}


def test_an_action_from_another_site_without_tls_is_refused(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Browsers leave Sec-Fetch-Site out there, and name the origin: the page's own, or a proxy's in Airflow's settings."""
    admin = visit("admin")

    def code(origin: str) -> str:
        path = "/tidegate/api/pipelines/clicks/actions/skip"
        answer = admin.http.post(path, json={"txid": 99, "reason": "a test"}, headers={**ACTION, "Origin": origin})
        return str(answer.json()["code"])

    own = str(admin.http.base_url).rstrip("/")
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "")
    for origin in ("http://evil.example", "http://proxy.example", "null", "http://[", f"{own}.evil.example"):
        assert code(origin) == "FOREIGN_REQUEST", origin
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "http://Proxy.example/airflow")
    assert code("http://evil.example") == "FOREIGN_REQUEST"
    assert code("http://proxy.example") == code(own) != "FOREIGN_REQUEST"
