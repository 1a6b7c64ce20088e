"""A project whose states get and lose columns: by the verbs that its authors type, with Spark, from the first file on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CommandLine
from tidegate.state_store import Settings

ORDERS = '''"""Orders as they come, the newest of each, and what each was."""

from tidegate import Count, Files, History, Newest, Pipeline, Rows, State

COLUMNS = {@COLUMNS@}

PIPELINE = Pipeline(
    name="orders",
    version=@VERSION@,
    source=Files("orders", glob="*.json", format="json", schema={"id": "int", "at": "int", @SCHEMA@}),
    states={
        "log": Rows({"id": "integer", **COLUMNS}),
        "newest_order": Newest(key={"id": "integer"}, columns=COLUMNS, order_by={"at": "integer"}),
        "orders_then": History(key={"id": "integer"}, columns=COLUMNS, order_by={"at": "integer"}),
        "counted": State(key={"id": "integer"}, aggregates={"orders": Count()@MORE@}),
    },
)
'''
COPY = '''"""What becomes of orders."""

from tidegate import Changes, Pipeline, Rows

PIPELINE = Pipeline(
    name="copy", version=@VERSION@, source=Changes("orders.log"), states={"copied": Rows({"id": "integer", "city": "text"})},
    transform=lambda rows: rows.selectExpr("id", "city"),
)
'''


@pytest.fixture
def shop(settings: Settings) -> CommandLine:
    """The command line in a project."""
    for folder in ("pipelines", "migrations", "orders"):
        (settings.home / folder).mkdir()
    return CommandLine(settings, {"TIDEGATE_HOME": str(settings.home)})


@pytest.fixture
def declare(shop: CommandLine) -> Callable[..., None]:
    """A function that writes the module of the pipeline."""

    def write(version: int, columns: str = "", more: str = "", **schema: str) -> None:
        text = ORDERS.replace("@VERSION@", str(version)).replace("@COLUMNS@", columns).replace("@MORE@", more)
        typed = ", ".join(f'"{name}": "{kind}"' for name, kind in schema.items())
        (shop.settings.home / "pipelines/orders.py").write_text(text.replace("@SCHEMA@", typed))

    return write


def said(shop: CommandLine, *arguments: str) -> str:
    """Run a verb that succeeds, and return all that it says."""
    done = shop(*arguments)
    assert done.returncode == 0, done.stderr
    return " ".join((done.stdout + done.stderr).split())


def refused(shop: CommandLine, *arguments: str) -> str:
    """Run a verb that is refused, and return what it says."""
    done = shop(*arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    return " ".join(done.stderr.split())


def rows(shop: CommandLine, pipeline: str, state: str, *columns: str) -> list[list[Any]]:
    """Return columns of a state's rows."""
    return [[row[column] for column in columns] for row in shop.json("inspect", pipeline, "--state", state)]


def write(home: Path, name: str, *orders: dict[str, Any]) -> None:
    """Write a file of orders."""
    (home / "orders" / f"{name}.json").write_text("".join(f"{json.dumps(order)}\n" for order in orders))


CENTS, CITY = '"cents": "integer"', '"city": "text"'
GETS = "State {} of pipeline orders gets city: NULL in all rows that committed before."


@pytest.mark.soak  # tests/jobs and tests/conformance change columns, too; test_rebuild.py writes migrations
@pytest.mark.promise("json:migrate")
def test_columns_come_and_go_in_a_project(shop: CommandLine, declare: Callable[..., None]) -> None:
    """Declare, be asked for a version, write the migration, migrate and run; batches and followers go on."""
    declare(1, CENTS, cents="int")
    said(shop, "migrate", "--new", "orders")
    assert "No migration" not in said(shop, "migrate")
    write(
        shop.settings.home, "1", {"id": 1, "at": 1, "cents": 5, "city": "Rome"}, {"id": 2, "at": 1, "cents": 7, "city": "Oslo"}
    )
    said(shop, "run", "orders")

    declare(1, f"{CENTS}, {CITY}", cents="int", city="string")
    assert "raise the pipeline's version above 1" in refused(shop, "migrate")
    assert GETS.format("log") in refused(shop, "migrate", "--new", "city")
    assert "raise the pipeline's version above 1" in refused(shop, "migrate", "--new", "city")
    declare(2, f"{CENTS}, {CITY}", more=', "more": Count("cents")', cents="int", city="string")
    assert "state counted: more, count(cents), is new, and would lack the earlier batches" in refused(
        shop, "migrate", "--new", "x"
    )
    assert [file.name for file in (shop.settings.home / "migrations").glob("*.py")] == ["0001_orders.py"]

    declare(2, f"{CENTS}, {CITY}", cents="int", city="string")
    written = shop.json("migrate", "--new", "city")
    assert [GETS.format(state) for state in ("log", "newest_order", "orders_then")] == written["columns"]
    assert Path(written["written"]).name == "0002_city.py"
    (shop.settings.home / "pipelines/copy.py").write_text(COPY.replace("@VERSION@", "1"))
    said(shop, "migrate", "--new", "copy")
    assert GETS.format("newest_order") in said(shop, "migrate")
    write(shop.settings.home, "2", {"id": 1, "at": 2, "cents": 6, "city": "Bern"})
    said(shop, "run", "orders")
    said(shop, "run", "copy")
    assert rows(shop, "orders", "log", "txid", "id", "cents", "city") == [
        [1, 1, 5, None],
        [1, 2, 7, None],
        [2, 1, 6, "Bern"],
    ]
    assert rows(shop, "orders", "newest_order", "id", "cents", "city") == [[1, 6, "Bern"], [2, 7, None]]
    then = [[1, 1, 5, None, 2], [1, 2, 6, "Bern", None], [2, 1, 7, None, None]]
    assert rows(shop, "orders", "orders_then", "id", "at", "cents", "city", "valid_to") == then
    assert sorted(rows(shop, "copy", "copied", "id", "city"), key=repr) == [[1, "Bern"], [1, None], [2, None]]
    (found,) = shop.json("get", "orders", "newest_order", "1")
    assert found["row"]["city"] == "Bern"

    declare(3, CITY, city="string")
    written = shop.json("migrate", "--new", "cents")
    assert "loses cents: the values are gone then, and no migration brings them back." in written["columns"][0]
    assert "loses cents" in " ".join(shop.json("migrate")["columns"])
    assert "Registered: nothing new." in said(shop, "migrate")
    write(shop.settings.home, "3", {"id": 2, "at": 3, "city": "Rome"})
    said(shop, "run", "orders")
    said(shop, "run", "copy")
    assert rows(shop, "orders", "newest_order", "id", "city") == [[1, "Bern"], [2, "Rome"]]
    assert len(rows(shop, "copy", "copied", "id")) == 4
