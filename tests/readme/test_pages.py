"""What `docs/` shows works as it stands: declarations can be registered, the script for roles is the printed one."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import in_process

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ["delta", "files", "iceberg", "inputs", "queries", "state-size", "states", "storage", "topologies", "windows"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCUMENTS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.promise("name:*")
@pytest.mark.parametrize("page", PAGES)
def test_the_declarations_of_a_page_can_be_registered(register: Callable[..., None], page: str) -> None:
    names: dict[str, Any] = {}
    pipelines = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)
        if "PIPELINE" in names:
            pipelines[names["PIPELINE"].name] = names["PIPELINE"]
    assert pipelines
    register(*pipelines.values())


@pytest.mark.promise("verb:migrate")
def test_the_script_for_administrators_is_the_printed_one(tmp_path: Path) -> None:
    assert [in_process.run(["migrate", "--print-roles"], {}, tmp_path).stdout] == blocks("postgres", "sql")
