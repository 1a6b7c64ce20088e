"""What a real browser shows when an answer is refused, fails, stays the same or cannot be drawn: never what is old as new."""

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.batches import Batches
from tests.page.auth_manager import GRANTS
from tests.page.browsers import dialog_of, needs_chromium, tab_of
from tests.page.conftest import Server
from tests.page.pipelines import CLICKS
from tidegate.state_store import StateStore

pytestmark = [needs_chromium, pytest.mark.soak]

CLICKS_VIEW = "/tidegate/#/pipelines/clicks"
AWAY = {"code": "STORE_UNAVAILABLE", "message": "The ledger is away.", "page": None}


@pytest.fixture(scope="module")
def clicks(server: Server) -> Iterator[Batches]:
    with StateStore.connect(server.settings) as store:
        batches = Batches(store, CLICKS)
        batches.plan("a run", 2)
        batches.seal(2)
        yield batches


@pytest.mark.promise("decision:0056")
@pytest.mark.parametrize("width", [1440, 390])
def test_a_permission_that_is_taken_away_stands_beside_what_was_shown(
    browser: Browser, server: Server, clicks: Batches, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    with tab_of(browser, server, "clerk") as page:
        page.set_viewport_size({"width": width, "height": 844})
        page.goto(CLICKS_VIEW)
        expect(page.get_by_text("cursor is at txid 0")).to_be_visible()  # "live" stands there before there is an answer
        with monkeypatch.context() as patch:
            patch.setitem(GRANTS, "clerk", {})
            refused = page.get_by_role("alert").filter(has_text="does not let you read Dag clicks")
            expect(refused.filter(has_text="What is shown of clicks is no longer current: it was so at 20")).to_be_visible()
            expect(page.get_by_role("button", name="stale")).to_be_visible()
            expect(page.get_by_text("all that was planned has committed").or_(page.get_by_text("2 txids"))).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.get_by_role("button", name="live")).to_be_visible()


@pytest.mark.promise("decision:0056")
def test_a_route_that_fails_hides_behind_no_other(page: Page) -> None:
    page.goto(CLICKS_VIEW)
    expect(page.get_by_text("cursor is at txid 0")).to_be_visible()
    page.route("**/timeline?*", lambda route: route.fulfill(status=503, json=AWAY))
    expect(page.get_by_role("alert")).to_contain_text("The ledger is away. What is shown of the timeline is no longer current")
    expect(page.get_by_role("button", name="stale")).to_be_visible()
    expect(page.locator(".banner")).to_have_count(0)
    page.unroute("**/timeline?*")
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.promise("decision:0056")
def test_a_wait_goes_on_while_nothing_changes(page: Page) -> None:
    for view in ("", "/batches"):
        page.goto("about:blank")
        page.goto(f"{CLICKS_VIEW}{view}")
        wait = (
            page.locator(".readout", has_text="longest wait").or_(page.get_by_role("cell").locator("time[title^=since]")).first
        )
        shown = wait.inner_text()
        expect(wait).not_to_have_text(shown)
        with page.expect_response(lambda answer: "/clicks/" in answer.url and answer.status == 304):
            pass


@pytest.mark.promise("decision:0056")
def test_what_cannot_be_drawn_is_said_and_ends_nothing_else(page: Page) -> None:
    def spoil(route: Route) -> None:
        answer = route.fetch(headers={**route.request.headers, "if-none-match": ""})
        spoiled = {**answer.headers, "etag": '"spoiled"'}
        route.fulfill(response=answer, headers=spoiled, body=json.dumps({**answer.json(), "attempts": None}))

    page.route("**/batches/2", spoil)
    page.goto(f"{CLICKS_VIEW}/batches/2")
    expect(page.get_by_role("alert")).to_contain_text("Txid 2 cannot be drawn: ")
    expect(page.get_by_role("heading", level=1)).to_contain_text("txid 2")
    page.unroute("**/batches/2")
    page.get_by_role("button", name="Draw it again").click()
    expect(page.get_by_text("Frozen when the batch was planned")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    page.evaluate("localStorage.setItem('timezone', JSON.stringify('Asia/Tokyo')); dispatchEvent(new Event('storage'))")
    expect(page.get_by_text("GMT+9 (2").first).to_be_visible()  # the zone that is chosen in Airflow


@pytest.mark.promise("decision:0056")
def test_a_dialog_that_another_operator_has_overtaken_keeps_focus_and_text(page: Page) -> None:
    page.goto(CLICKS_VIEW)
    expect(page.get_by_text("cursor is at txid 0")).to_be_visible()
    dialog = dialog_of(page, "Pause")
    dialog.get_by_role("textbox").fill("a test")
    refusal = {"will": "It is paused.", "allowed": False, "refusal": "Another operator has paused it.", "command": "tidegate"}
    page.route("**/actions/pause", lambda route: route.fulfill(json=refusal))
    expect(dialog.get_by_role("alert")).to_contain_text("Another operator has paused it.")
    expect(dialog.get_by_role("heading")).to_be_focused()
    page.unroute_all()
    expect(dialog.get_by_role("textbox")).to_have_value("a test")
    expect(dialog.get_by_role("textbox")).to_be_focused()
