"""The page of limits says what the code says."""

import importlib
import re
from functools import reduce

import pytest

from tests.checkout import REPOSITORY, module_of

ROW = re.compile(r"^\| ([^|]+) \| ([\d,.]+)(?: (\w+))? \| `([\w/]+)\.py`, `([\w.]+)` \|")
UNITS = {"MiB": 1024**2}


@pytest.mark.promise("limit:*")
def test_each_limit_is_what_the_page_says() -> None:
    lines = (REPOSITORY / "docs/limits.md").read_text().splitlines()
    for line in (line for line in lines if line.startswith("| ") and not line.startswith("| limit ")):
        row = ROW.match(line)
        assert row, line
        _, value, unit, file, name = row.groups()
        found = reduce(getattr, name.split("."), importlib.import_module(module_of(file)))
        assert float(value.replace(",", "")) * UNITS.get(unit, 1) == found, line
