"""Debian's Chromium, driven by Playwright: users who log in to a whole stack, and what they see there."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.end_to_end.conftest import Shop, wait_for

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; Debian: apt-get install chromium")
PATIENCE_MS = 120_000
expect.set_options(timeout=PATIENCE_MS)
SIZES = {"narrow": {"width": 390, "height": 844}, "wide": {"width": 1440, "height": 900}}


@contextmanager
def launched() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not work for root, as whom CI runs. It opens nothing but this project's page.
        options = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@contextmanager
def tab(browser: Browser, **options: Any) -> Iterator[Page]:
    """Open an empty tab in a context of its own; nothing may go wrong in the browser."""
    errors: list[str] = []
    with browser.new_context(**options) as context:
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
    assert errors == []


class Visit:
    def __init__(self, browser: Browser, shop: Shop, name: str) -> None:
        self._browser = browser
        self.url = shop.settings.airflow_url
        passwords = json.loads((shop.settings.stack_folder / "secrets/airflow_passwords.json").read_text())
        with tab(browser) as page:
            page.goto(f"{self.url}/tidegate/")  # leads to Airflow's login, and back
            page.locator("input[name=username]").fill(name)
            page.locator("input[name=password]").fill(passwords[name])
            page.keyboard.press("Enter")
            page.wait_for_url(f"{self.url}/tidegate/")
            expect(page.get_by_role("heading", level=1)).to_have_text("Pipelines")
            self.login = page.context.storage_state()

    @contextmanager
    def page(self, view: str | None = "", size: str = "wide", scheme: Any = "light", path: str = "") -> Iterator[Page]:
        shown = {"viewport": SIZES[size], "color_scheme": scheme, "reduced_motion": "reduce"}
        with tab(self._browser, storage_state=self.login, **shown) as page:
            page.goto(f"{self.url}{path}" if path else f"{self.url}/tidegate/#/{view}")
            yield page


class Trouble:
    """A run that stands still: one batch commits, one waits for it, one has failed, as its file changed, and one waits."""

    def __init__(self, shop: Shop) -> None:
        self._shop, self._held = shop, ExitStack()
        txids = shop.sell(4)
        _, self.waits, self.changed, self.stuck = txids
        with shop.held("attempt"):
            self.run_id = shop.client.trigger("orders", {})
            wait_for(lambda: shop.phases(txids) == ["planned"] * 4, "the plan")
            batch = shop.json("inspect", "orders", "--txid", str(self.changed))
            self._file = shop.home / "data/orders" / batch["source_metadata"]["files"][0]["name"]
            self._content = self._file.read_bytes()
            self._file.write_bytes(self._content + self._content.splitlines(keepends=True)[-1])
            self._held.enter_context(shop.held("commit"))
        wait_for(lambda: shop.phases(txids) == ["processed", "processed", "halted", "processed"], "processing")

    def let_commit(self) -> None:
        self._held.close()
        assert self._shop.end_of("orders", self.run_id) == "failed"

    def put_back(self) -> None:
        self._file.write_bytes(self._content)

    def views(self) -> dict[str, tuple[str, str]]:
        """Return the views of the pipeline, by name: the address, and what is shown once the data is there."""
        place = "pipelines/orders"
        return {
            "overview": ("", "pipelines? needs? a person"),
            "timeline": (place, "cursor is at txid"),
            "batches": (f"{place}/batches", "waits for"),
            "batch": (f"{place}/batches/{self.changed}", "Frozen when the batch was planned"),
            "states": (f"{place}/states/revenue", "one row per "),
            "quarantine": (f"{place}/quarantine", "Quarantine is empty"),
            "actions": (f"{place}/actions", "About the pipeline"),
            "unknown": ("nowhere", "names no view"),
        }

    def problems(self, visit: Visit, size: str, scheme: str, keep: Callable[[Page, str], None]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, (view, shown) in self.views().items():
            with visit.page(view, size, scheme) as page:
                expect(page.get_by_text(re.compile(shown, re.IGNORECASE)).first).to_be_visible()
                if name == "batch":
                    dialog_of(page, f"Retry txid {self.changed}").get_by_role("textbox").wait_for()
                    found[f"{name}: dialog"] = _serious(page)
                    page.keyboard.press("Escape")
                found[name] = _serious(page)
                if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                    found[name].append("it scrolls sideways")
                keep(page, name)
        return {name: problems for name, problems in found.items() if problems}


def _serious(page: Page) -> list[str]:
    violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def dialog_of(page: Page, button: str) -> Locator:
    page.get_by_role("button", name=button, exact=True).first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    return dialog
