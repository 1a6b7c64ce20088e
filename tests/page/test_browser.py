"""The page in a real browser, on a whole stack of its own: how each view looks, and what the browser can go through.

What an operator does there is in `tests/end_to_end/test_one_airflow.py`. `make pictures` runs this file, for the pictures in
docs/page.
"""

import os
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.end_to_end.conftest import Project, project, wait_for  # noqa: F401 - project is a fixture
from tests.page.browsers import SIZES, Trouble, Visit, needs_chromium

pytestmark = [needs_chromium, pytest.mark.soak]

PICTURES = Path(__file__).resolve().parents[2] / "docs/page"
IS_KEEPING = bool(os.environ.get("PICTURES"))
KEPT = {"overview", "timeline", "batch"}


@pytest.fixture(scope="module")
def stack(project: Project) -> Project:  # noqa: F811 - the fixture
    assert project.json("trigger", "flights", "--wait")["committed"] == [1, 2, 3, 4]
    assert project.json("trigger", "word_count", "--wait")["state"] == "success"
    return project


@pytest.fixture(scope="module")
def operator(browser: Browser, stack: Project) -> Visit:
    return Visit(browser, stack, "admin")


@pytest.fixture(scope="module")
def trouble(stack: Project) -> Iterator[Trouble]:
    """A batch that needs a person; its run stands still until `let_commit`."""
    made = Trouble(stack, "flights", stack.next_flights(4))
    yield made
    made.let_commit()


def keep(page: Page, name: str) -> None:
    """Renew a picture of the documentation, if that is wanted."""
    if IS_KEEPING:
        page.mouse.move(0, 0)
        page.wait_for_timeout(1000)  # Airflow's panels slide in
        PICTURES.mkdir(exist_ok=True)
        taken = Image.open(BytesIO(page.screenshot())).convert("RGB")
        taken.quantize(colors=128, dither=Image.Dither.NONE).save(PICTURES / f"{name}.png", optimize=True)


def test_airflow_shows_which_txid_failed_and_which_waits(trouble: Trouble, operator: Visit) -> None:
    wait_for(lambda: trouble.tasks()["commit", f"txid {trouble.waits}"] == "deferred", "the wait for its turn", every=0.5)
    with operator.page(path=f"/dags/flights/runs/{trouble.run_id}") as page:
        expect(page.get_by_text(f"txid {trouble.waits}").first).to_be_visible()
        if IS_KEEPING:
            page.get_by_role("button", name="Expand all task groups").click()
            keep(page, "airflow-grid")
            page.get_by_role("button", name=re.compile("^Show Graph")).click()
            keep(page, "airflow-graph")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_view_is_accessible_and_fits(trouble: Trouble, operator: Visit, size: str, scheme: str) -> None:
    """Axe finds nothing serious, and the page never scrolls sideways."""
    trouble.let_commit()

    def keep_some(page: Page, view: str) -> None:
        if view in KEPT:
            keep(page, f"{view}-{size}-{scheme}")

    assert trouble.problems(operator, "daily", size, scheme, keep_some) == {}


def test_it_says_when_the_server_is_away_and_recovers(trouble: Trouble, operator: Visit) -> None:
    with operator.page("pipelines/flights") as page:
        link = page.get_by_role("link", name=re.compile("^txid 3, "))
        link.focus()
        page.context.set_offline(True)
        expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
        expect(page.get_by_text("stale")).to_be_visible()
        expect(link).to_be_focused()
        page.context.set_offline(False)
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(link).to_be_focused()


def test_it_works_inside_airflows_frame(trouble: Trouble, operator: Visit) -> None:
    with operator.page(path="/plugin/tidegate") as page:
        frame = page.frame_locator("iframe")
        expect(frame.get_by_role("heading", level=1)).to_have_text("Pipelines")
        keep(page, "inside-airflow")
    with operator.page(path="/dags/flights/plugin/tidegate-pipeline") as page:
        frame = page.frame_locator("iframe")
        expect(frame.get_by_role("heading", level=1)).to_contain_text("flights")
        frame.get_by_role("link", name="full page").click()
        page.wait_for_url(re.compile(r"/tidegate/#/pipelines/flights"))
