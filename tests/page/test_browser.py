"""What a real browser shows of an answer that cannot be drawn, and does with bad records.

How each view looks is in `tests/end_to_end/test_one_airflow.py`; `tidegate/page/frontend/tests` need no browser.
"""

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, Route, expect

from tests.batches import Batches
from tests.page.browsers import dialog_of, launched, needs_chromium, tab
from tests.page.conftest import Server
from tests.page.ledgers import as_owner
from tests.page.pipelines import CLICKS
from tests.page.users import token_of
from tidegate.state_store import StateStore

pytestmark = [needs_chromium, pytest.mark.soak]

CLICKS_VIEW = "/tidegate/#/pipelines/clicks"
LONG, SHORT, WITH_RETURN = 1, 2, 3  # numbers of bad records
RECORDS = {LONG: "x" * 50_000, SHORT: "a;2", WITH_RETURN: "a;1\r"}
INSERT = "INSERT INTO tidegate.quarantine VALUES ('clicks', 1, %s, 'cents is no number', 'a.csv', %s, true)"


@pytest.fixture(scope="module")
def clicks(server: Server) -> None:
    """Pipeline clicks: txid 1 has committed, with bad records, 2 is planned, 3 is processed."""
    with StateStore.connect(server.settings) as store:
        batches = Batches(store, CLICKS)
        batches.plan("a run", 3)
        for txid in (1, 3):
            batches.seal(txid)
        for record in RECORDS.items():
            as_owner(server.settings, INSERT, record)
        batches.commit(1)


@pytest.fixture
def page(server: Server, clicks: None) -> Iterator[Page]:
    """An empty tab of the administrator, in which nothing may go wrong."""
    with launched() as browser, tab(browser, base_url=server.url) as page:
        page.context.add_cookies([{"name": "_token", "value": token_of(server.url, "admin"), "url": server.url}])
        yield page


@pytest.mark.promise("decision:0056")
def test_what_cannot_be_drawn_is_said_and_ends_nothing_else(page: Page) -> None:
    def spoil(route: Route) -> None:
        answer = route.fetch(headers={**route.request.headers, "if-none-match": ""})
        spoiled = {**answer.headers, "etag": '"spoiled"'}
        route.fulfill(response=answer, headers=spoiled, body=json.dumps({**answer.json(), "attempts": None}))

    page.route("**/batches/3", spoil)
    page.goto(f"{CLICKS_VIEW}/batches/3")
    expect(page.get_by_role("alert")).to_contain_text("Txid 3 cannot be drawn: ")
    expect(page.get_by_role("heading", level=1)).to_contain_text("txid 3")
    page.unroute("**/batches/3")
    page.get_by_role("button", name="Draw it again").click()
    expect(page.get_by_text("Frozen when the batch was planned")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    page.evaluate("localStorage.setItem('timezone', JSON.stringify('Asia/Tokyo')); dispatchEvent(new Event('storage'))")
    expect(page.get_by_text("GMT+9 (2").first).to_be_visible()  # the zone that is chosen in Airflow


@pytest.mark.promise("decision:0056")
def test_a_dialog_that_another_operator_has_overtaken_keeps_focus_and_text(page: Page) -> None:
    page.goto(CLICKS_VIEW)
    expect(page.get_by_text("cursor is at txid 1")).to_be_visible()
    dialog = dialog_of(page, "Pause")
    dialog.get_by_role("textbox").fill("a test")
    refusal = {"will": "It is paused.", "allowed": False, "refusal": "Another operator has paused it.", "command": "tidegate"}
    page.route("**/actions/pause", lambda route: route.fulfill(json=refusal))
    expect(dialog.get_by_role("alert")).to_contain_text("Another operator has paused it.")
    expect(dialog.get_by_role("heading")).to_be_focused()
    page.unroute_all()
    expect(dialog.get_by_role("textbox")).to_have_value("a test")
    expect(dialog.get_by_role("textbox")).to_be_focused()


@pytest.mark.promise("verb:quarantine")
def test_a_record_is_mended_whole_or_left_to_the_command_line(page: Page, server: Server) -> None:
    """Mending again starts from what was mended. A text field would turn a carriage return into a newline."""
    page.goto(f"{CLICKS_VIEW}/quarantine")
    for number, found, added in ((LONG, RECORDS[LONG], ";5"), (SHORT, "a;2", ";6"), (SHORT, "a;2;6", ";7")):
        mend = dialog_of(page, f"Mend record {number} of txid 1")
        field = mend.get_by_label("The record")
        expect(field).to_have_value(found)
        field.press("Control+End")
        field.type(added)
        mend.get_by_label("Reason").fill("the amount was missing")
        mend.get_by_role("button", name="Mend", exact=True).dblclick()
        expect(mend).to_have_count(0)
        payloads = "SELECT payload, mended_payload FROM tidegate.quarantine WHERE number = %s"
        assert as_owner(server.settings, payloads, [number]) == [(RECORDS[number], found + added)]
    mend = dialog_of(page, f"Mend record {WITH_RETURN} of txid 1")
    expect(mend.get_by_role("alert")).to_contain_text(f"tidegate quarantine mend clicks 1 {WITH_RETURN}")
    expect(mend.get_by_role("textbox")).to_have_count(0)
