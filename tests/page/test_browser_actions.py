"""Bad records in a real browser, on a real api-server without Dags: what a text field could spoil."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.batches import Batches
from tests.page.browsers import dialog_of, needs_chromium
from tests.page.conftest import Server
from tests.page.ledgers import as_owner
from tests.page.pipelines import CLICKS
from tidegate.state_store import StateStore

pytestmark = [needs_chromium, pytest.mark.soak]

LONG, SHORT, TWO_LINES, LAST = 1, 2, 3, 4  # numbers of bad records
PARTIAL = 5  # the number of what a commit has set aside
LENGTH = 50_000
WITH_RETURN = "a;1\r"


@pytest.fixture(scope="module")
def clicks(server: Server) -> Iterator[Batches]:
    """Pipeline clicks with a committed batch and four bad records of it."""
    with StateStore.connect(server.settings) as store:
        batches = Batches(store, CLICKS)
        (committed,) = batches.plan("a run", 1)
        batches.seal(committed)
        records = [(LONG, "x" * LENGTH), (SHORT, "a;2"), (TWO_LINES, WITH_RETURN), (LAST, "a;4")]
        for number, payload in records:
            as_owner(
                server.settings,
                "INSERT INTO tidegate.quarantine (pipeline, txid, number, reason, origin, payload, is_raw)"
                " VALUES ('clicks', %s, %s, 'cents is no number', 'a.csv', %s, true)",
                [committed, number, payload],
            )
        as_owner(
            server.settings,
            "INSERT INTO tidegate.quarantine (pipeline, txid, number, state, reason, origin, payload, is_raw)"
            " VALUES ('clicks', %s, %s, 'total', 'check few: too many', 'state total', '{\"all_clicks\": 7}', false)",
            [committed, PARTIAL],
        )
        batches.commit(committed)
        yield batches


def stored(server: Server, number: int) -> tuple[str, str | None]:
    (row,) = as_owner(
        server.settings,
        "SELECT payload, mended_payload FROM tidegate.quarantine WHERE pipeline = 'clicks' AND number = %s",
        [number],
    )
    return row


def test_a_partial_that_was_set_aside_is_only_shown(page: Page) -> None:
    """It waits for no replay, so nothing is offered for it."""
    page.goto("/tidegate/#/pipelines/clicks/quarantine")
    expect(page.get_by_text("4 records wait to be replayed")).to_be_visible()
    expect(page.get_by_text("1 partial was set aside by a commit")).to_be_visible()
    expect(page.get_by_text("state total", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name=f"Mend record {PARTIAL} of txid 1")).to_have_count(0)


def test_a_record_is_mended_whole(page: Page, server: Server) -> None:
    page.goto("/tidegate/#/pipelines/clicks/quarantine")
    mend = dialog_of(page, f"Mend record {LONG} of txid 1")
    field = mend.get_by_label("The record")
    expect(field).to_have_value("x" * LENGTH)
    field.press("End")
    field.press("Control+End")
    field.type(";5")
    mend.get_by_label("Reason").fill("the amount was missing")
    mend.get_by_role("button", name="Mend", exact=True).dblclick()
    expect(mend).to_have_count(0)

    expect(page.get_by_text("mended by admin, page mend")).to_be_visible()
    assert stored(server, LONG) == ("x" * LENGTH, "x" * LENGTH + ";5")


def test_mending_again_starts_from_the_mended_record(page: Page, server: Server) -> None:
    page.goto("/tidegate/#/pipelines/clicks/quarantine")
    for found, text in [("a;2", "a,2"), ("a,2", "b,2")]:
        mend = dialog_of(page, f"Mend record {SHORT} of txid 1")
        expect(mend.get_by_label("The record")).to_have_value(found)
        expect(mend.get_by_text("It was mended before")).to_have_count(int(found != "a;2"))
        mend.get_by_label("The record").fill(text)
        mend.get_by_label("Reason").fill("a typing error")
        mend.get_by_role("button", name="Mend", exact=True).click()
        expect(mend).to_have_count(0)
        assert stored(server, SHORT) == ("a;2", text)


def test_a_record_that_a_browser_would_change_is_left_to_the_command_line(page: Page, server: Server) -> None:
    """A text field turns carriage returns into newlines, wherever the operator types."""
    page.goto("/tidegate/#/pipelines/clicks/quarantine")
    mend = dialog_of(page, f"Mend record {TWO_LINES} of txid 1")
    expect(mend.get_by_role("alert")).to_contain_text(f"tidegate quarantine mend clicks 1 {TWO_LINES}")
    expect(mend.get_by_role("textbox")).to_have_count(0)
    mend.get_by_role("button", name="Cancel").click()
    assert stored(server, TWO_LINES) == (WITH_RETURN, None)
