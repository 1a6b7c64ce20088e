"""Migrations of a project of its own: a line beside Tidegate's, so that neither ever gets between the other's numbers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psycopg2
import pytest

from tests.conftest import register_pipelines
from tests.integration.conftest import TALLY
from tests.servers import Server
from tests.store import project
from tidegate import migrations
from tidegate.jobs import Count, Pipeline, State
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import SchemaOutOfDate

REPOSITORY = Path(__file__).resolve().parents[2]
VERSIONS = "migrations/versions"
# A state, and a column that will be added.
SALES = """
from tidegate import Count, Files, Min, Pipeline, State

PIPELINE = Pipeline(
    name="sales",
    source=Files("sales", glob="*.csv", format="csv", schema={"shop": "string"}),
    states={"daily": State(key={"shop": "text"}, aggregates={"sold": Count()@MORE@})},
)
"""
DAILY = """
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.execute("CREATE TABLE state.daily (shop text)")
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shop(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A project with a pipeline, and settings for it with an empty database."""
    for part in ("pipelines", "migrations"):
        (tmp_path / "100% my shop" / part).mkdir(parents=True)
    name = server.create_database()
    settings = replace(server.settings, pg_database=name, home=tmp_path / "100% my shop")
    declare(settings)
    monkeypatch.setenv(project.HOME_VARIABLE, str(settings.home))
    yield settings
    server.drop_database(name)


def declare(shop: Settings, *more: str) -> None:
    """Write the project's pipeline, with further aggregates."""
    (shop.home / "pipelines/sales.py").write_text(SALES.replace("@MORE@", "".join(f", {each}" for each in more)))


def tidegate(shop: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a project, of this checkout or another one."""
    where = shop.conninfo()
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "PGHOST": where["host"],
        "PGPORT": str(where["port"]),
        "PGDATABASE": where["dbname"],
        "PGPASSFILE": where["passfile"],
    }
    command = [sys.executable, "-c", "from tidegate.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=shop.home, env=environment, capture_output=True, text=True, timeout=300, check=False)


def migrated(shop: Settings, *more: str, message: str = "sales") -> str:
    """Declare the pipeline, write its migration and run it; return the migration's file name."""
    declare(shop, *more)
    wrote = tidegate(shop, "migrate", "--new", message, "--json")
    assert wrote.returncode == 0, wrote.stderr
    done = tidegate(shop, "migrate")
    assert done.returncode == 0, done.stderr
    return Path(json.loads(wrote.stdout)["written"]).name


def asked(shop: Settings, statement: str, user: str | None = None) -> list[tuple]:
    """Return what a role is answered."""
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
def test_a_project_has_a_line_of_its_own(shop: Settings) -> None:
    """Its numbers begin at 1; its states may have names of the examples' states; nothing is written elsewhere."""
    refused = tidegate(shop, "migrate")
    assert (refused.returncode, "tidegate migrate --new" in refused.stderr) == (1, True), refused.stderr
    before = sorted(file.name for file in (REPOSITORY / VERSIONS).glob("*.py"))

    assert migrated(shop) == "0001_sales.py"
    assert columns(shop, "daily") == ["shop", "sold", "txid"]
    assert columns(shop, "word_count") == []
    assert migrated(shop, '"first": Min("shop", "text")') == "0002_sales.py"
    assert columns(shop, "daily") == ["shop", "sold", "txid", "first"]
    again = tidegate(shop, "migrate", "--new", "again")
    assert "No migration is missing" in again.stdout + again.stderr
    assert sorted(file.name for file in (REPOSITORY / VERSIONS).glob("*.py")) == before


def test_every_process_needs_the_projects_revision(shop: Settings) -> None:
    """A database that is older or newer than the project is refused, with what to do; the roles can tell."""
    migrated(shop)
    StateStore.connect(shop).close()
    for role in ("tidegate", "tidegate_reader"):
        assert asked(shop, "SELECT version_num FROM tidegate.alembic_version_of_project", role) == [("0001",)]

    file = shop.home / "migrations/0002_more.py"
    file.write_text((shop.home / "migrations/0001_sales.py").read_text())
    with pytest.raises(SchemaOutOfDate, match=r"at revision 0001 of the project's migrations, which are at 0002. Run"):
        StateStore.connect(shop)
    file.unlink()
    for left in ([], ["0001_sales.py"]):
        kept = {name: (shop.home / "migrations" / name).read_text() for name in ["0001_sales.py"] if name not in left}
        for name in kept:
            (shop.home / "migrations" / name).unlink()
        if left:
            asked(shop, "UPDATE tidegate.alembic_version_of_project SET version_num = '0007' RETURNING 1", shop.pg_owner)
        for verb in (["inspect", "sales"], ["migrate"], ["migrate", "--new", "x"]):
            refused = tidegate(shop, *verb)
            assert refused.returncode == 1
            assert "newer than those in" in refused.stderr
            assert "Update the project." in refused.stderr
        for name, content in kept.items():
            (shop.home / "migrations" / name).write_text(content)


def test_the_examples_do_not_take_a_projects_place(shop: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its folder of pipelines is not mounted, or not in this branch: no migration for them is run or written."""
    migrated(shop)
    (shop.home / "pipelines").rename(shop.home / "elsewhere")
    refusal = r"at revision 0001 of a project's migrations, and .*100% my shop has no folder pipelines\. Go into that project's"
    for step in (migrations.upgrade, migrations.upgrade_all_but_broken, partial(migrations.new_revision, message="flights")):
        with pytest.raises(SchemaOutOfDate, match=refusal):
            step(shop, [TALLY.spec])
    assert asked(shop, "SELECT pipeline FROM tidegate.pipeline") == [("sales",)]
    monkeypatch.delenv(project.HOME_VARIABLE)
    StateStore.connect(shop).close()  # programs that read states need no project


def test_states_of_another_project_stay(shop: Settings) -> None:
    """Its table has the name of a state: the migration is refused, and takes nothing away."""
    migrations.upgrade(shop, [])
    register_pipelines(
        shop, Pipeline("others", TALLY.source, states={"daily": State(key={"day": "date"}, aggregates={"sold": Count()})})
    )
    before = columns(shop, "daily")
    (shop.home / "migrations/0001_sales.py").write_text(DAILY)

    refused = tidegate(shop, "migrate")

    assert refused.returncode == 1
    assert "already exists" in refused.stderr
    assert columns(shop, "daily") == before


@pytest.mark.promise("decision:0020")
def test_a_migration_that_fails_changes_nothing(shop: Settings) -> None:
    """Both lines are one transaction with the registration."""
    declare(shop)
    assert tidegate(shop, "migrate", "--new", "sales").returncode == 0
    with pytest.raises(SchemaOutOfDate, match=r"at revision none of the project's migrations, which are at 0001. Run"):
        StateStore.connect(shop)
    file = shop.home / "migrations/0001_sales.py"
    file.write_text(file.read_text().replace("def downgrade", "    op.execute('SELECT 1/0')\n\n\ndef downgrade", 1))

    failed = tidegate(shop, "migrate")

    assert failed.returncode != 0
    assert columns(shop, "daily") == []
    assert asked(shop, "SELECT count(*) FROM tidegate.alembic_version_of_project") == [(0,)]
    assert asked(shop, "SELECT count(*) FROM tidegate.pipeline") == [(0,)]


def test_a_migration_of_another_branch_is_not_taken_for_the_one_that_was_run(shop: Settings) -> None:
    """A database knows a migration by its number; the name of its file shows that another one has it here."""
    migrated(shop)
    own, other = (shop.home / f"migrations/0001_{name}.py" for name in ("sales", "of_another_branch"))
    own.rename(other)
    for arguments in (("migrate",), ("migrate", "--new", "more"), ("run", "sales")):
        refused = tidegate(shop, *arguments)
        assert refused.returncode == 1
        assert "has had migration 0001_sales.py of a project, and" in refused.stderr, refused.stderr
        assert "has 0001_of_another_branch.py in its place" in refused.stderr
    other.rename(own)
    assert migrated(shop, '"first": Min("shop", "text")') == "0002_sales.py"


def test_two_migrations_of_one_number_are_named(shop: Settings) -> None:
    """As two branches write them. With the one that the database has had, and the other one written again, it goes on."""
    migrated(shop)
    (shop.home / "migrations/0001_of_another_branch.py").write_text((shop.home / "migrations/0001_sales.py").read_text())
    for arguments in (("migrate",), ("migrate", "--new", "more")):
        refused = tidegate(shop, *arguments)
        assert refused.returncode == 1
        assert "Migrations 0001_of_another_branch.py and 0001_sales.py in" in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr
    (shop.home / "migrations/0001_of_another_branch.py").unlink()
    assert migrated(shop, '"first": Min("shop", "text")') == "0002_sales.py"
