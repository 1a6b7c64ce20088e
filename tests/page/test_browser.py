"""The page in a real browser, on a whole stack of its own: how each view looks. `make pictures` keeps some of it in docs/page.

What an operator does there is in `tests/end_to_end/test_one_airflow.py`.
"""

import os
from io import BytesIO
from itertools import product
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page

from tests.end_to_end.conftest import Project, project  # noqa: F401 - project is a fixture
from tests.page.browsers import SIZES, Trouble, Visit, needs_chromium

PICTURES = Path(__file__).resolve().parents[2] / "docs/page"
IN_DOCS = {"overview-narrow-dark", "timeline-wide-light", "timeline-wide-dark", "batch-narrow-light", "airflow-grid"}


def keep(page: Page, name: str) -> None:
    """Renew a picture of the documentation, if that is wanted."""
    if name in IN_DOCS and os.environ.get("PICTURES"):
        page.mouse.move(0, 0)
        page.wait_for_timeout(1000)  # Airflow's panels slide in
        taken = Image.open(BytesIO(page.screenshot())).convert("RGB")
        taken.quantize(colors=128, dither=Image.Dither.NONE).save(PICTURES / f"{name}.png", optimize=True)


@needs_chromium
@pytest.mark.soak
def test_every_view_is_accessible_and_fits_in_each_size_and_scheme(project: Project, browser: Browser) -> None:  # noqa: F811
    assert project.json("trigger", "flights", "--wait")["committed"] == [1, 2, 3, 4]
    operator, trouble = Visit(browser, project, "admin"), Trouble(project, "flights", project.next_flights(4))
    with operator.page(path=f"/dags/flights/runs/{trouble.run_id}") as page:
        page.get_by_role("button", name="Expand all task groups").click()
        keep(page, "airflow-grid")
    trouble.let_commit()
    for size, scheme in product(SIZES, ("light", "dark")):
        keep_some = lambda page, view, to=f"{size}-{scheme}": keep(page, f"{view}-{to}")  # noqa: E731
        assert trouble.problems(operator, "daily", size, scheme, keep_some) == {}
