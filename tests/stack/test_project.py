"""A project of its own on an embedded stack: Spark's Python workers import its modules, and see what an author changes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import COMMAND
from tests.store import project

REPOSITORY = Path(__file__).resolve().parents[2]
PRICES = """
def in_cents(parts):
    for part in parts:
        part["cents"] = part["euros"] * @FACTOR@
        yield part[["shop", "cents"]]
"""
ORDERS = """
from tidegate import Count, Files, Pipeline, State, Sum

from ._prices import in_cents


def transform(orders):
    return orders.mapInPandas(in_cents, "shop string, cents long")


PIPELINE = Pipeline(
    name="orders",
    source=Files("orders", glob="*.csv", format="csv", schema={"shop": "string", "euros": "int"}),
    transform=transform,
    states={"revenue": State(key={"shop": "text"}, aggregates={"orders": Count(), "cents": Sum("cents")})},
)
"""


class Shop:
    """A project, and its command line, as from a shell in its folder."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def __call__(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != project.HOME_VARIABLE}
        environment |= {"PYTHONPATH": str(REPOSITORY), "TIDEGATE_MIN_FILE_AGE_SECONDS": "0"}
        command = [sys.executable, "-c", "from tidegate.cli import main; main()", *arguments]
        done = subprocess.run(command, cwd=self.home, env=environment, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def sells(self, name: str, euros: int) -> None:
        """Write a file with one order, and a module with the price in cents."""
        (self.home / "orders").mkdir(exist_ok=True)
        (self.home / f"orders/{name}.csv").write_text(f"shop,euros\n{name},{euros}\n")

    def prices(self, factor: int) -> None:
        (self.home / "pipelines/_prices.py").write_text(PRICES.replace("@FACTOR@", str(factor)))


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    subprocess.run([COMMAND, "init", tmp_path / "shop"], check=True, capture_output=True)
    shop = Shop(tmp_path / "shop")
    (shop.home / "pipelines/orders.py").write_text(ORDERS)
    shop.prices(100)
    try:
        shop("up", "--without-airflow")
        yield shop
    finally:
        shop("down", "--delete-data", "--yes")


@pytest.mark.soak
def test_changed_code_reaches_running_workers(shop: Shop) -> None:
    """That of a module which the pipeline's module imports: a worker keeps what it has imported for as long as it lives."""
    shop("migrate", "--new", "orders")
    shop("migrate")
    for number, factor in enumerate((100, 200, 300), start=1):
        shop.prices(factor)
        shop.sells(f"shop {number}", 7)
        assert f"txid {number}" in shop("run", "orders")
    printed = shop("inspect", "orders", "--state", "revenue")
    assert [line.split()[-2] for line in printed.splitlines() if re.match(r"shop \d", line)] == ["700", "1400", "2100"]
