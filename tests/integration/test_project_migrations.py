"""Migrations of a project of its own: a line beside Tidegate's, so that neither ever gets between the other's numbers."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psycopg2
import pytest

from tests.integration.conftest import TALLY, run_verb
from tests.servers import Server
from tests.store import project
from tidegate import migrations
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import SchemaOutOfDate

REPOSITORY = Path(__file__).resolve().parents[2]
# A state, and a column that will be added.
SALES = """
from tidegate import Count, Files, Min, Pipeline, State

PIPELINE = Pipeline(
    name="sales",
    source=Files("sales", glob="*.csv", format="csv", schema={"shop": "string"}),
    states={"daily": State(key={"shop": "text"}, aggregates={"sold": Count()@MORE@})},
)
"""


@pytest.fixture
def shop(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    for part in ("pipelines", "migrations"):
        (tmp_path / "100% my shop" / part).mkdir(parents=True)
    name = server.create_database()
    settings = replace(server.settings, pg_database=name, home=tmp_path / "100% my shop")
    declare(settings)
    monkeypatch.setenv(project.HOME_VARIABLE, str(settings.home))
    yield settings
    server.drop_database(name)


def declare(shop: Settings, *more: str) -> None:
    (shop.home / "pipelines/sales.py").write_text(SALES.replace("@MORE@", "".join(f", {each}" for each in more)))


def refusal(shop: Settings, *arguments: str) -> str:
    refused = run_verb(shop, shop.home, *arguments)
    assert refused.returncode == 1
    return refused.stderr


def migrated(shop: Settings, *more: str, message: str = "sales") -> str:
    """Declare the pipeline, write its migration and run it; return the migration's file name."""
    declare(shop, *more)
    wrote = run_verb(shop, shop.home, "migrate", "--new", message, "--json")
    assert wrote.returncode == 0, wrote.stderr
    done = run_verb(shop, shop.home, "migrate")
    assert done.returncode == 0, done.stderr
    return Path(json.loads(wrote.stdout)["written"]).name


def asked(shop: Settings, statement: str, user: str | None = None) -> list[tuple]:
    connection = psycopg2.connect(**shop.conninfo(user=user))
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()
    finally:
        connection.close()


def columns(shop: Settings, table: str) -> list[str]:
    """Return the columns of a state's table; none if there is no table."""
    statement = f"SELECT attname FROM pg_attribute WHERE attrelid = to_regclass('state.{table}') AND attnum > 0 ORDER BY attnum"
    return [name for (name,) in asked(shop, statement)]


@pytest.mark.promise("decision:0045")
def test_a_project_has_a_line_of_its_own(shop: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers begin at 1; its states may have names of the examples' states, which never take its place."""
    before = sorted((REPOSITORY / "migrations").rglob("*.py"))
    assert migrated(shop) == "0001_sales.py"
    assert columns(shop, "daily") == ["shop", "sold", "txid"]
    assert columns(shop, "word_count") == []
    assert migrated(shop, '"first": Min("shop", "text")') == "0002_sales.py"
    assert columns(shop, "daily") == ["shop", "sold", "txid", "first"]
    assert sorted((REPOSITORY / "migrations").rglob("*.py")) == before

    (shop.home / "pipelines").rename(shop.home / "elsewhere")  # as when this folder is not mounted, or not in this branch
    said = r"at revision 0002 of a project's migrations, and .*100% my shop has no folder pipelines\. Go into that project's"
    for step in (migrations.upgrade, migrations.upgrade_all_but_broken, partial(migrations.new_revision, message="flights")):
        with pytest.raises(SchemaOutOfDate, match=said):
            step(shop, [TALLY.spec])
    assert asked(shop, "SELECT pipeline FROM tidegate.pipeline") == [("sales",)]
    monkeypatch.delenv(project.HOME_VARIABLE)
    StateStore.connect(shop).close()  # programs that read states need no project


def test_every_process_needs_the_projects_revision(shop: Settings) -> None:
    migrated(shop)
    own, other, more = (shop.home / f"migrations/{name}.py" for name in ("0001_sales", "0001_of_another_branch", "0002_more"))
    StateStore.connect(shop).close()
    for role in ("tidegate", "tidegate_reader"):
        assert asked(shop, "SELECT version_num FROM tidegate.alembic_version_of_project", role) == [("0001",)]

    more.write_text(own.read_text())
    with pytest.raises(SchemaOutOfDate, match=r"at revision 0001 of the project's migrations, which are at 0002. Run"):
        StateStore.connect(shop)
    more.unlink()

    other.write_text(own.read_text())
    for verb in (["migrate"], ["migrate", "--new", "x"]):
        assert "Migrations 0001_of_another_branch.py and 0001_sales.py in" in (said := refusal(shop, *verb)), said
        assert "Traceback" not in said
    kept = own.read_text()
    own.unlink()
    for verb in (["migrate"], ["migrate", "--new", "x"], ["run", "sales"]):
        said = refusal(shop, *verb)
        assert "has had migration 0001_sales.py of a project, and" in said
        assert "has 0001_of_another_branch.py in its place" in said
    other.unlink()

    for verb in (["inspect", "sales"], ["migrate"], ["migrate", "--new", "x"]):
        assert re.search("newer than those in.*Update the project.", refusal(shop, *verb))
    own.write_text(kept)
    asked(shop, "UPDATE tidegate.alembic_version_of_project SET version_num = '0007' RETURNING 1", shop.pg_owner)
    assert re.search("newer than those in.*Update the project.", refusal(shop, "migrate"))
    asked(shop, "UPDATE tidegate.alembic_version_of_project SET version_num = '0001' RETURNING 1", shop.pg_owner)
    assert migrated(shop, '"first": Min("shop", "text")') == "0002_sales.py"
