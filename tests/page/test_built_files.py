"""The page's built files belong to its sources, its types to the server's models. Needs no Node; `make check-page` builds."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests.page.server_types import FILE, server_types

PAGE = Path(__file__).resolve().parents[2] / "tidegate/page"
FRONTEND, STATIC = PAGE / "frontend", PAGE / "static"
INPUTS = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", "src"]


@pytest.mark.promise("decision:0056")
def test_the_page_is_built_from_these_sources_with_the_types_of_the_servers_models() -> None:
    assert FILE.read_text() == server_types(), "run: make page"
    digest = hashlib.sha256()
    listed = subprocess.run(["git", "ls-files", *INPUTS], cwd=FRONTEND, capture_output=True, text=True, check=True)
    for name in sorted(listed.stdout.splitlines()):
        digest.update(name.encode() + b"\0" + (FRONTEND / name).read_bytes() + b"\0")
    assert (STATIC / "sources.sha256").read_text().strip() == digest.hexdigest(), "run: make page"
