"""The page of limits says what the code says."""

import importlib
import re
from functools import reduce

import pytest

from tests.checkout import REPOSITORY, module_of


@pytest.mark.promise("limit:*")
def test_each_limit_is_what_the_page_says() -> None:
    lines = (REPOSITORY / "docs/limits.md").read_text().splitlines()
    for line in (line for line in lines if line.startswith("| ") and not line.startswith("| limit ")):
        row = re.match(r"\| ([^|]+) \| ([\d,.]+)(?: (\w+))? \| `([\w/]+)\.py`, `([\w.]+)` \|", line)
        assert row, line
        _, value, unit, file, name = row.groups()
        found = reduce(getattr, name.split("."), importlib.import_module(module_of(file)))
        assert float(value.replace(",", "")) * (1024**2 if unit == "MiB" else 1) == found, line
