"""The page of limits says what the code says."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import module_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
ROW = re.compile(
    r"^\| (?P<limit>[^|]+) \| (?P<value>[\d,.]+)(?: (?P<unit>\w+))? "
    r"\| `(?P<file>[\w/]+)\.py`, `(?P<name>[\w.]+)` \|"
)
UNITS = {"MiB": 1024**2}
ROWS = [found for line in PAGE.read_text().splitlines() if (found := ROW.match(line))]


@pytest.mark.promise("limit:*")
def test_each_limit_is_what_the_page_says() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| limit ")]
    assert len(rows) == len(ROWS), "a row is of another form, and would not be looked at"
    for row in ROWS:
        found: Any = importlib.import_module(module_of(row["file"]))
        for part in row["name"].split("."):
            found = getattr(found, part)
        assert float(row["value"].replace(",", "")) * UNITS.get(row["unit"], 1) == found, row["limit"]
