"""The page's built files belong to its sources, its types to the server's models. Needs no Node; `make check-page` builds."""

import gzip
import hashlib
import re
import subprocess
from pathlib import Path

import pytest

from tests.page.server_types import FILE, server_types

PAGE = Path(__file__).resolve().parents[2] / "tidegate/page"
FRONTEND, STATIC = PAGE / "frontend", PAGE / "static"
INPUTS = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", "src"]
LARGEST_BYTES = 150_000


def tracked(*names: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *names], cwd=FRONTEND, capture_output=True, text=True, check=True)
    return sorted(listed.stdout.splitlines())


def test_the_page_is_built_from_these_sources() -> None:
    digest = hashlib.sha256()
    for name in tracked(*INPUTS):
        digest.update(name.encode() + b"\0" + (FRONTEND / name).read_bytes() + b"\0")

    assert (STATIC / "sources.sha256").read_text().strip() == digest.hexdigest(), "run: make page"


@pytest.mark.promise("decision:0056")
def test_the_pages_types_are_those_of_the_servers_models() -> None:
    """So a name or a null that the server changes is found by the compiler."""
    assert FILE.read_text() == server_types(), "run: make page"


def test_everything_that_the_page_loads_is_there_and_nothing_else() -> None:
    page = (STATIC / "index.html").read_text()
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)

    assert {STATIC / name for name in loaded} == set((STATIC / "assets").iterdir())
    assert {STATIC / name for name in ("index.html", "sources.sha256", "assets")} == set(STATIC.iterdir())
    assert "<script>" not in page  # the server's policy allows none within the page
    assert "style=" not in page


def test_the_page_is_small() -> None:
    sent = sum(len(gzip.compress(file.read_bytes())) for file in STATIC.rglob("*") if file.is_file())

    assert sent < LARGEST_BYTES


def test_the_lockfile_pins_contents_and_names_no_registry() -> None:
    lock = (FRONTEND / "package-lock.json").read_text()

    assert '"resolved"' not in lock
    assert lock.count('"integrity": "sha512-') == len(re.findall(r'^    "node_modules/', lock, re.MULTILINE))
