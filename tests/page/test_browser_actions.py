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

LONG, SHORT, WITH_RETURN = 1, 2, 3  # numbers of bad records
LENGTH = 50_000
RECORDS = """
INSERT INTO tidegate.quarantine (pipeline, txid, number, reason, origin, payload, is_raw)
SELECT 'clicks', %s, number, 'cents is no number', 'a.csv', payload, true
FROM unnest(%s) WITH ORDINALITY AS records (payload, number)
"""


@pytest.fixture(scope="module")
def clicks(server: Server) -> Iterator[Batches]:
    """Pipeline clicks with a committed batch and three bad records of it."""
    with StateStore.connect(server.settings) as store:
        batches = Batches(store, CLICKS)
        (committed,) = batches.plan("a run", 1)
        batches.seal(committed)
        as_owner(server.settings, RECORDS, [committed, ["x" * LENGTH, "a;2", "a;1\r"]])
        batches.commit(committed)
        yield batches


def stored(server: Server, number: int) -> tuple[str, str | None]:
    query = "SELECT payload, mended_payload FROM tidegate.quarantine WHERE pipeline = 'clicks' AND number = %s"
    (row,) = as_owner(server.settings, query, [number])
    return row


@pytest.mark.promise("verb:quarantine")
def test_a_record_is_mended_whole_or_left_to_the_command_line(page: Page, server: Server) -> None:
    """Mending again starts from what was mended. A text field would turn a carriage return into a newline."""
    page.goto("/tidegate/#/pipelines/clicks/quarantine")
    for number, found, added in ((LONG, "x" * LENGTH, ";5"), (SHORT, "a;2", ";6"), (SHORT, "a;2;6", ";7")):
        mend = dialog_of(page, f"Mend record {number} of txid 1")
        field = mend.get_by_label("The record")
        expect(field).to_have_value(found)
        field.press("Control+End")
        field.type(added)
        mend.get_by_label("Reason").fill("the amount was missing")
        mend.get_by_role("button", name="Mend", exact=True).dblclick()
        expect(mend).to_have_count(0)
        assert stored(server, number)[1] == found + added
    assert [stored(server, number)[0] for number in (LONG, SHORT)] == ["x" * LENGTH, "a;2"]
    mend = dialog_of(page, f"Mend record {WITH_RETURN} of txid 1")
    expect(mend.get_by_role("alert")).to_contain_text(f"tidegate quarantine mend clicks 1 {WITH_RETURN}")
    expect(mend.get_by_role("textbox")).to_have_count(0)
