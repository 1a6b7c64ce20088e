"""Debian's Chromium, driven by Playwright."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; Debian: apt-get install chromium")


@contextmanager
def launched() -> Iterator[Browser]:
    """Run Chromium without a window."""
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not work for root, as whom CI runs. It opens nothing but this project's page.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()
