"""Who may use the page: Airflow's login, its permissions on Dags, requests that other sites have made up, and limits."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import jwt
import pytest
from starlette.requests import ClientDisconnect
from starlette.routing import Mount, Route

from tests.integration.conftest import holding
from tests.page.auth_manager import PerDagAuthManager
from tests.page.conftest import ACTION, JWT_SECRET, PATIENCE_SECONDS, Server, Visit, Visitor
from tests.page.ledgers import write_rows
from tests.statements import execute
from tests.store import state_rows
from tidegate.page.access import MOST_REQUESTS
from tidegate.page.app import create_app
from tidegate.page.routes import state_routes
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import StateStore

VALUES = {"pipeline": "clicks", "state": "per_page", "txid": "1", "number": "1", "verb": "pause"}
VALUES |= {"code": "HOLE_DETECTED", "query": "clicks_of"}
VERBS = ("retry", "skip", "pause", "resume", "replay")
ROWS = "/tidegate/api/pipelines/clicks/states/per_page/rows"
LOGS_IN = ("/", "/go")  # pages for people: they lead to the login


def routes() -> list[tuple[str, str]]:
    found = [route for route in create_app().routes if isinstance(route, Route)]
    assert len(found) > 15
    return [(method, route.path.format_map(VALUES)) for route in found for method in sorted(route.methods or ())]


def request(visitor: Visitor, method: str, path: str, body: str = '{"reason": "a test", "payload": "x"}') -> httpx.Response:
    given = {"content": body, "headers": {**ACTION, "Content-Type": "application/json"}} if method == "POST" else {}
    return visitor.http.request(method, f"/tidegate{path}", params={"pipeline": "clicks"}, **given)


def token_of(secret: str, *, expires_in: int = 600) -> str:
    now = int(time.time())
    claims = {"sub": "admin", "role": "admin", "teams": [], "iat": now - 900, "nbf": now - 900, "exp": now + expires_in}
    return jwt.encode(claims | {"aud": "apache-airflow", "jti": f"test {now}"}, secret, algorithm="HS512")


@pytest.mark.promise("security:user-of-airflow-on-operator-page")
def test_every_route_asks_for_a_login(visit: Visit) -> None:
    """The only mount is of public files. The body of a request that is refused is not read."""
    assert [route.path for route in create_app().routes if isinstance(route, Mount)] == ["/assets"]
    for expires_in, status in ((600, 200), (-300, 401)):
        token = token_of(JWT_SECRET, expires_in=expires_in)
        by_cookie, by_header = visit(), visit()
        by_cookie.http.cookies.set("_token", token)
        by_header.http.headers["Authorization"] = f"Bearer {token}"
        assert [each.get("/api/me").status_code for each in (by_cookie, by_header)] == [status, status]

    wrong: list[tuple[object, ...]] = []
    another = "a secret that is not the server's, of more than 64 bytes, as HS512 wants it"
    for token in (None, "forged", token_of(another), token_of(JWT_SECRET, expires_in=-300)):
        visitor = visit()
        if token:
            visitor.http.cookies.set("_token", token)
        for method, path in routes():
            answer = request(visitor, method, path, "[" * 10_000)
            if path in LOGS_IN:
                to_login = answer.headers.get("Location", "").startswith("/api/v2/auth/login?next=%2Ftidegate")
                is_refused = (answer.status_code, to_login) == (307, True)
            else:
                is_refused = answer.status_code in ((401, 403) if path == "/metrics" else (401,))
            wrong += [] if is_refused else [(token, method, path, answer.status_code)]
    assert wrong == []


@pytest.mark.promise("security:user-of-airflow-on-operator-page")
def test_users_see_the_pipelines_whose_dags_they_may_read(visit: Visit) -> None:
    """Airflow is asked twice, who may read and who may change, however many Dags there are: its manager may be a server."""
    for name, seen in {"viewer": ["broken", "clicks", "orphan"], "clerk": ["clicks", "orphan"], "nobody": []}.items():
        visitor = visit(name)
        PerDagAuthManager.asked.clear()
        shown = visitor.json("/pipelines")
        assert (sorted(row["name"] for row in shown["pipelines"]), shown["total"]) == (seen, len(seen))
        assert PerDagAuthManager.asked == [3, len(seen)][: 1 + bool(seen)]


@pytest.mark.promise("security:user-of-airflow-on-operator-page")
def test_every_route_of_a_pipeline_asks_for_permission(visit: Visit) -> None:
    nobody = visit("nobody")
    asked = [each for each in routes() if "/pipelines/clicks" in each[1]]
    assert len(asked) > 8
    for method, path in asked:
        one, other = (request(nobody, method, each) for each in (path, path.replace("/clicks", "/no_such_pipeline")))
        assert (one.status_code, other.status_code) == (403, 403), path
        assert one.json()["message"].replace("clicks", "x") == other.json()["message"].replace("no_such_pipeline", "x"), path


@pytest.mark.promise("security:user-of-airflow-on-operator-page")
def test_readers_read_and_do_not_act(visit: Visit, store: StateStore) -> None:
    actions = len(visit("admin").json("/pipelines/clicks")["actions"])
    for name in ("viewer", "clerk"):
        reader = visit(name)
        assert reader.json("/pipelines/clicks")["may_act"] is False
        for verb in VERBS:
            assert reader.act("clicks", verb, txid=1).status_code == 403
        prospect = reader.json("/pipelines/clicks/actions/pause")
        assert (prospect["allowed"], "does not let you" in prospect["refusal"]) == (False, True)
    assert [visit("clerk").act("orphan", verb).status_code for verb in ("pause", "resume")] == [200, 200]
    assert len(visit("admin").json("/pipelines/clicks")["actions"]) == actions


def test_an_error_names_no_pipeline_that_the_user_may_not_see(visit: Visit) -> None:
    clerk = visit("clerk")
    answers = [clerk.get(f"/api/pipelines/no_pipeline{path}") for path in ("", "/batches", "/actions/skip")]
    answers += [clerk.act(name, verb, txid=1) for name in ("no_pipeline", "orphan") for verb in VERBS]
    for answer in answers:
        assert "broken" not in answer.text, (answer.url, answer.text)
    assert clerk.json("/pipelines/orphan")["causes"]


@pytest.mark.promise("security:another-site-in-browser-of-logged-in")
def test_requests_that_another_site_has_made_up_do_nothing(visit: Visit) -> None:
    admin = visit("admin")
    path, body = "/tidegate/api/pipelines/clicks/actions/pause", {"reason": "a trap"}
    sites = [{**ACTION, "Sec-Fetch-Site": site} for site in ("cross-site", "same-site")]
    for headers in ({}, {"X-Tidegate-Action": "0"}, *sites):
        assert admin.http.post(path, json=body, headers=headers).status_code == 403
    assert admin.http.post(path, data={"reason": "a form"}, headers={"Sec-Fetch-Site": "cross-site"}).status_code in (403, 422)
    assert admin.get("/go", pipeline="//evil.example/").headers["Location"] == "/tidegate/#/pipelines/%2F%2Fevil.example%2F"
    assert admin.json("/pipelines/clicks")["paused"] is None
    assert admin.http.post(path, json=body, headers={**ACTION, "Sec-Fetch-Site": "same-origin"}).status_code == 200
    assert admin.act("clicks", "resume").status_code == 200


def test_answers_of_one_user_are_not_kept_for_another(visit: Visit) -> None:
    answer = visit("admin").get("/api/pipelines")
    assert answer.headers["Cache-Control"] == "private, no-cache"
    assert {"Cookie", "Authorization"} <= set(answer.headers["Vary"].split(", "))
    known = {"If-None-Match": answer.headers["ETag"]}
    assert visit("admin").http.get("/tidegate/api/pipelines", headers=known).status_code == 304
    assert visit("nobody").http.get("/tidegate/api/pipelines", headers=known).status_code == 200


@pytest.mark.promise("security:another-site-in-browser-of-logged-in")
def test_browsers_are_told_what_the_page_may_do(visit: Visit) -> None:
    for path in ("/", "/api/me", "/api/no_such_path", "/errors/NO_SUCH_CODE"):
        headers = visit("admin").get(path).headers
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'self'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.promise("security:user-who-asks-query")
def test_queries_are_for_those_who_may_read_all_that_they_read(visit: Visit) -> None:
    for name, mine in {"viewer": ["clicks_of", "of_both"], "clerk": ["clicks_of"], "nobody": []}.items():
        visitor = visit(name)
        assert [query["name"] for query in visitor.json("/queries")] == mine
        for query in ("clicks_of", "of_both", "no_such_query"):
            allowed = visitor.get(f"/api/queries/{query}", **({"least": 1} if query == "clicks_of" else {})).status_code
            assert allowed == (200 if query in mine else 404), (name, query)
    refused = visit("clerk").get("/api/queries/of_both").json()
    assert refused["code"] == "UNKNOWN_QUERY"
    assert refused["message"] == "There is no query of_both that you may ask. Queries: clicks_of."
    assert visit("viewer").json("/queries/of_both")["txids"].keys() == {"clicks", "broken"}


@pytest.mark.promise("limit:SECONDS_PER_PART")
def test_a_download_whose_reader_stands_still_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its snapshot would hold up vacuum and migrations, and its place others' downloads, for as long as the reader likes."""
    monkeypatch.setattr(state_routes, "SECONDS_PER_PART", 0.2)
    opened, closed = ExitStack(), []
    opened.callback(closed.append, True)

    async def receive() -> dict[str, object]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        if message.get("body"):
            await asyncio.sleep(60)

    for spec_version in ("2.3", "2.4"):
        download = state_routes.Download("clicks.csv", iter(["a part"]), opened)
        with pytest.raises((TimeoutError, ClientDisconnect)):
            asyncio.run(download({"type": "http", "asgi": {"spec_version": spec_version}}, receive, send))
        assert closed


@pytest.mark.promise("limit:MOST_BYTES")
def test_a_wrong_body_is_refused_with_a_short_answer(visit: Visit) -> None:
    for content, status in (
        (json.dumps({"keys": [[1] * 300_000]}), 422),
        (json.dumps({"keys": [[1]] * 200_000}), 422),
        (json.dumps({"keys": [["a"]] * 1001}), 422),
        ("[" * 500_000, 422),
        ("\0" * 1000, 422),
        (" " * 2_000_000, 413),
    ):
        answer = visit("viewer").http.post(ROWS, content=content)
        assert (answer.status_code, len(answer.text) < 1000) == (status, True), content[:20]


@pytest.mark.promise("limit:PAGE_CHARACTERS")
def test_rows_of_keys_are_no_longer_than_a_page(server: Server, visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    viewer = visit("viewer")
    write_rows(server.settings, "clicks", "per_page", [("a long one", "2026-02-01", 1, "1.0000", 1)])
    key = viewer.json("/pipelines/clicks/states/per_page/rows", limit=1)["rows"][0][:2]
    monkeypatch.setattr(state_rows, "PAGE_CHARACTERS", 5)
    assert viewer.http.post(ROWS, json={"keys": [key]}).json()["rows"][0][:2] == key
    refused = viewer.http.post(ROWS, json={"keys": [key] * 400})
    assert (refused.status_code, refused.json()["code"]) == (422, "USAGE_ERROR")
    assert "over 5 characters" in refused.json()["message"]


@pytest.mark.promise("limit:MOST_REQUESTS")
def test_many_requests_of_one_user_leave_room_for_others(server: Server, visit: Visit) -> None:
    """They would take all threads of the api-server, and all connections of the page: here, while a table is locked."""
    waiting = """SELECT count(*) FROM pg_stat_activity WHERE usename = 'tidegate_reader' AND wait_event_type = 'Lock'
                 AND datname = current_database()"""

    def at_work() -> int:
        return execute(server.settings.conninfo(user="postgres"), waiting)[0][0]

    admin, viewer = visit("admin"), visit("viewer")
    with ThreadPoolExecutor(60) as many, holding(server.settings, "LOCK TABLE state.per_page") as holder:
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
