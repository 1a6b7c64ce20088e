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

LONG, SHORT, TWO_LINES, LAST, PARTIAL = 1, 2, 3, 4, 5  # numbers of bad records, and of what a commit has set aside
LENGTH, WITH_RETURN = 50_000, "a;1\r"
RECORDS = """
INSERT INTO tidegate.quarantine (pipeline, txid, number, reason, origin, payload, is_raw)
SELECT 'clicks', %s, number, 'cents is no number', 'a.csv', payload, true
FROM unnest(%s) WITH ORDINALITY AS records (payload, number);
INSERT INTO tidegate.quarantine (pipeline, txid, number, state, reason, origin, payload, is_raw)
VALUES ('clicks', %s, %s, 'total', 'check few: too many', 'state total', '{"all_clicks": 7}', false)
"""


@pytest.fixture(scope="module")
def clicks(server: Server) -> Iterator[Batches]:
    """Pipeline clicks with a committed batch and four bad records of it."""
    with StateStore.connect(server.settings) as store:
        batches = Batches(store, CLICKS)
        (committed,) = batches.plan("a run", 1)
        batches.seal(committed)
        records = ["x" * LENGTH, "a;2", WITH_RETURN, "a;4"]
        as_owner(server.settings, RECORDS, [committed, records, committed, PARTIAL])
        batches.commit(committed)
        yield batches


def stored(server: Server, number: int) -> tuple[str, str | None]:
    query = "SELECT payload, mended_payload FROM tidegate.quarantine WHERE pipeline = 'clicks' AND number = %s"
    (row,) = as_owner(server.settings, query, [number])
    return row


def test_a_record_is_mended_whole_and_mending_again_starts_from_what_was_mended(page: Page, server: Server) -> None:
    page.goto("/tidegate/#/pipelines/clicks/quarantine")
    for number, found, added in ((LONG, "x" * LENGTH, ";5"), (SHORT, "a;2", ";6"), (SHORT, "a;2;6", ";7")):
        mend = dialog_of(page, f"Mend record {number} of txid 1")
        field = mend.get_by_label("The record")
        expect(field).to_have_value(found)
        expect(mend.get_by_text("It was mended before")).to_have_count(int(added == ";7"))
        field.press("End")
        field.press("Control+End")
        field.type(added)
        mend.get_by_label("Reason").fill("the amount was missing")
        mend.get_by_role("button", name="Mend", exact=True).dblclick()
        expect(mend).to_have_count(0)
        assert stored(server, number)[1] == found + added
    expect(page.get_by_text("mended by admin, page mend").first).to_be_visible()
    assert [stored(server, number)[0] for number in (LONG, SHORT)] == ["x" * LENGTH, "a;2"]


def test_what_a_browser_cannot_mend_is_left_to_the_command_line(page: Page, server: Server) -> None:
    """A text field turns carriage returns into newlines; a partial that was set aside waits for no replay."""
    page.goto("/tidegate/#/pipelines/clicks/quarantine")
    mend = dialog_of(page, f"Mend record {TWO_LINES} of txid 1")
    expect(mend.get_by_role("alert")).to_contain_text(f"tidegate quarantine mend clicks 1 {TWO_LINES}")
    expect(mend.get_by_role("textbox")).to_have_count(0)
    mend.get_by_role("button", name="Cancel").click()
    assert stored(server, TWO_LINES) == (WITH_RETURN, None)

    expect(page.get_by_text("4 records wait to be replayed")).to_be_visible()
    expect(page.get_by_text("1 partial was set aside by a commit")).to_be_visible()
    expect(page.get_by_text("state total", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name=f"Mend record {PARTIAL} of txid 1")).to_have_count(0)
