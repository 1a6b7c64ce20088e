"""The ledger is made as a whole; migrations lead to the declared states and back, in one line, with clear refusals."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa

from tests.checkout import copy_to
from tests.integration.conftest import Execute, Tally, until
from tests.servers import Server
from tests.store import ColumnType, KeyColumn, ValueColumn, project, schema_revision, state_tables, tables
from tidegate import migrations
from tidegate.jobs import Count, Files, Max, Min, Pipeline, State, Sum
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import AccessRefused, SchemaOutOfDate, StoreUnavailable, UsageError

REPOSITORY = Path(__file__).resolve().parents[2]
SALES = Pipeline(
    "sales",
    Files("sales", glob="*.csv", format="csv", schema={"shop": "string", "day": "date", "cents": "int"}),
    states={
        "daily": State(
            key={"shop": "text", "day": "date"},
            aggregates={"sold": Count(), "cents": Sum("cents"), "least": Min("cents"), "most": Max("cents")},
        )
    },
)
WORDS = Pipeline(
    "words",
    Files("texts", glob="*.csv", format="csv", schema={"word": "string"}),
    states={"word_count": State(key={"word": "text"}, aggregates={"occurrences": Count()})},
)
SPECS = [SALES.spec, WORDS.spec]


@pytest.fixture
def empty(server: Server, tmp_path: Path) -> Iterator[Settings]:
    """Settings with an empty database."""
    name = server.create_database()
    yield replace(server.settings, pg_database=name, home=tmp_path)
    server.drop_database(name)


@pytest.fixture(scope="module")
def written(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The migration of the states of SPECS, as `migrate --new` writes it."""
    name, home = server.create_database(), tmp_path_factory.mktemp("written")
    (home / "pipelines").mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(project.HOME_VARIABLE, str(home))
        path = migrations.new_revision(replace(server.settings, pg_database=name), SPECS, "states")
    assert path is not None
    yield path
    server.drop_database(name)


@pytest.fixture
def home(tmp_path: Path, written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a project with that migration, which functions of this process use."""
    for part in ("pipelines", "migrations"):
        (tmp_path / part).mkdir()
    shutil.copy(written, tmp_path / "migrations")
    monkeypatch.setenv(project.HOME_VARIABLE, str(tmp_path))
    return tmp_path


def shape(settings: Settings) -> dict[str, list[str]]:
    """Return everything that migrations create, as Postgres describes it."""
    queries = {
        "columns": """
            SELECT a.attrelid::regclass || '.' || attname || ' ' || format_type(atttypid, atttypmod) || ' ' || attnotnull
                   || coalesce(' ' || collation_name, '') || coalesce(' ' || pg_get_expr(adbin, adrelid), '')
                   || coalesce(' ' || col_description(attrelid, attnum), '') || coalesce(' ' || attacl::text, '')
            FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid
            LEFT JOIN pg_attrdef d ON d.adrelid = attrelid AND d.adnum = attnum
            LEFT JOIN (SELECT oid, collname AS collation_name FROM pg_collation) l ON l.oid = attcollation
            WHERE relnamespace = ANY (%s::regnamespace[]) AND attnum > 0 AND NOT attisdropped""",
        "relations": """
            SELECT oid::regclass || ' ' || relkind::text || coalesce(reloptions::text, '') || coalesce(relacl::text, '')
                   || coalesce(obj_description(oid, 'pg_class'), '')
            FROM pg_class WHERE relnamespace = ANY (%s::regnamespace[])""",
        "views": "SELECT pg_get_viewdef(oid) FROM pg_class WHERE relkind = 'v' AND relnamespace = ANY (%s::regnamespace[])",
        "constraints": """
            SELECT conrelid::regclass || ' ' || conname || ' ' || pg_get_constraintdef(oid)
            FROM pg_constraint WHERE connamespace = ANY (%s::regnamespace[])""",
        "triggers": """
            SELECT pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid
            WHERE NOT tgisinternal AND relnamespace = ANY (%s::regnamespace[])""",
        "functions": """
            SELECT pg_get_functiondef(oid) || coalesce(proacl::text, '')
            FROM pg_proc WHERE prokind <> 'a' AND pronamespace = ANY (%s::regnamespace[])""",
        "aggregates": """
            SELECT oid::regprocedure || ' ' || aggtransfn || ' ' || aggcombinefn || ' ' || aggtranstype::regtype
                   || ' ' || proparallel::text || coalesce(proacl::text, '')
            FROM pg_proc JOIN pg_aggregate ON aggfnoid = pg_proc.oid WHERE pronamespace = ANY (%s::regnamespace[])""",
        "schemas": "SELECT nspname || coalesce(nspacl::text, '') FROM pg_namespace WHERE oid = ANY (%s::regnamespace[])",
        "default grants": "SELECT defaclacl::text FROM pg_default_acl WHERE defaclnamespace = ANY (%s::regnamespace[])",
    }
    found: dict[str, list[str]] = {}
    with closing(psycopg2.connect(**settings.conninfo(user=settings.pg_owner))) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT nspname FROM pg_namespace WHERE nspname = ANY (%s)", [["tidegate", "state", "staging"]])
        schemas = [name for (name,) in cursor.fetchall()]
        for what, query in queries.items():
            cursor.execute(query, [schemas])
            found[what] = sorted(text for (text,) in cursor.fetchall())
    return found


def revision(settings: Settings) -> str | None:
    """Return a database's revision of the project."""
    with migrations.connected(settings) as connection:
        return schema_revision.current_revision(connection)


# up and down


def test_an_upgrade_builds_the_declared_tables(empty: Settings, home: Path) -> None:
    """The first call builds everything and registers the pipelines; the second finds nothing to do."""
    assert migrations.upgrade(empty, SPECS) == ("0001", [spec.name for spec in SPECS])
    built = shape(empty)
    with StateStore.connect(empty) as store:
        assert [lag.pipeline for lag in store.lag()] == sorted(spec.name for spec in SPECS)

    assert migrations.upgrade(empty, SPECS) == ("0001", [])
    assert shape(empty) == built


def test_migrations_create_the_declared_tables(empty: Settings, home: Path) -> None:
    """Not one column, type, default or constraint is missing or left over."""
    migrations.upgrade(empty, [])
    assert migrations.new_revision(empty, SPECS, "nothing") is None
    assert [file.name for file in (home / "migrations").glob("*.py")] == ["0001_states.py"]


def test_without_a_project_no_migration_is_written(empty: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """States have migrations in a project only; the ledger has none."""
    monkeypatch.setenv(project.HOME_VARIABLE, str(tmp_path))
    with pytest.raises(UsageError, match=r"has no folder pipelines.*tidegate init"):
        migrations.new_revision(empty, SPECS, "states")
    assert shape(empty)["relations"] == []


def test_state_tables_of_migrations_equal_those_of_declarations(empty: Settings, server: Server, home: Path) -> None:
    """Storage, triggers and grants, which autogenerate does not compare, are the same too."""
    migrations.upgrade(empty, [])
    name = server.create_database()
    declared = replace(empty, pg_database=name)
    try:
        migrations.upgrade(declared, [])
        with migrations.connected(declared) as connection:
            state_tables.metadata_of(tuple(SPECS)).drop_all(connection)
            state_tables.metadata_of(tuple(SPECS)).create_all(connection)
        assert shape(declared) == shape(empty)
    finally:
        server.drop_database(name)


def test_all_the_way_down_and_up_again(empty: Settings, home: Path) -> None:
    """What the project's migrations have made can be taken back, and made again."""
    migrations.upgrade(empty, SPECS)
    built = shape(empty)
    migrations.walk(empty, SPECS, "0000")
    assert revision(empty) is None
    assert not any("state.daily" in line for line in shape(empty)["relations"])
    migrations.walk(empty, SPECS, "0001")
    assert shape(empty) == built


# refusals


def test_a_state_without_a_migration_is_refused_and_nothing_is_done(empty: Settings, home: Path) -> None:
    """One sentence names the pipeline, its state and the command; the database stays as empty as it was."""
    (state,) = SPECS[0].states
    extra = replace(SPECS[0], name="extra", states=(replace(state, name="extra_state"),))
    with pytest.raises(SchemaOutOfDate) as refused:
        migrations.upgrade(empty, [*SPECS, extra])
    assert str(refused.value) == (
        "Pipeline extra is not registered: no migration creates its state extra_state. Write the missing migration: "
        "tidegate migrate --new 'what changed', then run: tidegate migrate"
    )
    assert shape(empty)["relations"] == []


@pytest.mark.promise("decision:0020")
def test_a_pipeline_without_a_migration_does_not_stop_the_others(empty: Settings, home: Path) -> None:
    """As when a stack starts: the others are registered, and a message for each that is not says why."""
    daily, counts = SPECS
    extra = replace(daily, name="extra", states=(replace(daily.states[0], name="extra_state"),))
    wider = replace(counts.states[0], values=(*counts.states[0].values, ValueColumn("more", ColumnType("bigint"), "sum")))
    changed = replace(counts, states=(wider,))
    rival = replace(daily, name="rival")

    broken = migrations.upgrade_all_but_broken(empty, [daily, extra, changed, rival])

    assert broken["extra"].startswith("Pipeline extra is not registered: no migration creates its state extra_state. Write")
    assert broken[counts.name].startswith(
        f"Pipeline {counts.name} is not registered: the migrations make another table of its state {wider.name}."
    )
    assert "belongs to pipeline sales: a state has one writer" in broken["rival"]
    assert set(broken) == {"extra", counts.name, "rival"}
    with StateStore.connect(empty) as store:
        assert [lag.pipeline for lag in store.lag()] == [daily.name]
    with pytest.raises(SchemaOutOfDate, match=r"belongs to pipeline sales: a state has one writer. Rename one of them"):
        migrations.new_revision(empty, [daily, rival], "two pipelines with a state of one name")


@pytest.mark.parametrize("upgrade", [migrations.upgrade, migrations.upgrade_all_but_broken])
def test_a_state_moves_to_a_pipeline_that_is_named_first(empty: Settings, home: Path, upgrade: Callable[..., Any]) -> None:
    """Its former owner is registered before the new one, in the same migration."""
    daily, counts = SPECS
    upgrade(empty, SPECS)
    without = replace(counts, states=(replace(counts.states[0], name="noted", updates=True),))
    moved = [replace(daily, states=(*daily.states, *counts.states)), without]
    assert upgrade(empty, moved) in ({}, ("0001", [counts.name, daily.name]))
    with migrations.connected(empty) as connection:
        assert set(connection.scalars(sa.select(tables.state_table.c.pipeline))) == {daily.name}


CHANGED = {
    "key added": {"keys": (*SPECS[0].states[0].keys, KeyColumn("more", ColumnType("text")))},
    "value added": {"values": (*SPECS[0].states[0].values, ValueColumn("more", ColumnType("bigint"), "sum"))},
    "value removed": {"values": SPECS[0].states[0].values[1:]},
    "value type": {"values": tuple(replace(value, type=ColumnType("numeric(38,2)")) for value in SPECS[0].states[0].values)},
    "keys nullable": {"keys": tuple(replace(key, nullable=True) for key in SPECS[0].states[0].keys)},
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED.keys())
def test_a_state_that_differs_from_its_migrations_is_refused(empty: Settings, home: Path, change: dict) -> None:
    """The comparison sees every kind of change that a declaration can make."""
    changed = replace(SPECS[0], states=(replace(SPECS[0].states[0], **change), *SPECS[0].states[1:]))
    with pytest.raises(SchemaOutOfDate, match="tidegate migrate --new"):
        migrations.upgrade(empty, [changed, *SPECS[1:]])


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            "0032",
            r"made by an earlier, unreleased revision of Tidegate \(0032\): make a new database and read the sources again",
        ),
        (
            "0123456789ab",
            r"made by another revision.*\(schema.sql 0123456789ab\).*use the code that made it; or make a new database",
        ),
    ],
)
def test_a_ledger_of_other_code_is_left_alone(settings: Settings, as_role: Execute, found: str, message: str) -> None:
    """It is not migrated in part, or read: the message says what to do."""
    as_role("tidegate_owner", "UPDATE tidegate.alembic_version SET version_num = %s", [found])
    before = shape(settings)
    for step in (migrations.upgrade, migrations.upgrade_all_but_broken, migrations.column_changes):
        with pytest.raises(SchemaOutOfDate, match=message):
            step(settings, SPECS)
    with pytest.raises(SchemaOutOfDate, match=message):
        migrations.new_revision(settings, SPECS, "states")
    with pytest.raises(SchemaOutOfDate, match=message):
        migrations.accept_epoch(settings, "an operator")
    assert shape(settings) == before


@pytest.mark.promise("limit:DDL_LOCK_TIMEOUT_SECONDS", "decision:0020")
def test_a_table_in_use_delays_a_migration_by_seconds_only(
    settings: Settings, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting ALTER would delay every later merge: it gives up, changes nothing, and may be tried again."""
    migrations.upgrade(settings, SPECS)
    monkeypatch.setattr(migrations, "DDL_LOCK_TIMEOUT_SECONDS", 0.2)
    with closing(psycopg2.connect(**settings.conninfo())) as reader, reader.cursor() as cursor:
        cursor.execute("SELECT FROM state.daily")
        with pytest.raises(StoreUnavailable, match="migrating: a lock timeout"):
            migrations.walk(settings, SPECS, "0000")
    assert revision(settings) == "0001"


def test_a_migration_that_is_stopped_holds_commits_up_for_seconds(tally: Tally, settings: Settings) -> None:
    """As Ctrl-Z does, or a machine that is gone: Postgres ends its transaction, and it may be tried again (I20)."""
    tally.plan()
    tally.process(1, [("a", 1, 1, 1, 1)])

    def is_stopped() -> None:
        with migrations.connected(replace(settings, idle_timeout_seconds=1)) as connection:
            connection.execute(sa.select(tables.cursor).with_for_update())
            assert tally.commit(1).already_committed is False
            connection.execute(sa.select(tables.cursor))

    with pytest.raises(StoreUnavailable, match="while migrating"):
        is_stopped()


def test_two_migrations_at_once_are_one(settings: Settings, home: Path, waiting: Callable[[], int]) -> None:
    """Such as `tidegate up` beside `tidegate migrate`: the second waits, and finds nothing to do."""
    with ThreadPoolExecutor(1) as pool:
        with migrations.connected(settings) as connection:
            assert migrations._upgrade(connection, [], may_wait=False).refused == {}
            second = pool.submit(migrations.upgrade, settings, [])
            until(waiting)
        assert second.result(30) == ("0001", [])
    assert revision(settings) == "0001"


def test_the_owners_search_path_does_not_hide_the_tables(settings: Settings, home: Path, as_role: Execute) -> None:
    """It may well name Tidegate's schemas, for people who use psql."""
    as_role("postgres", f"ALTER ROLE tidegate_owner IN DATABASE {settings.pg_database} SET search_path = tidegate, state")
    again = replace(settings, lock_timeout_seconds=58)  # with connections of its own
    assert migrations.upgrade(again, [])[0] == "0001"
    assert migrations.upgrade(again, SPECS)[1] == sorted(spec.name for spec in SPECS)
    assert migrations.upgrade(again, SPECS) == ("0001", [])


def test_only_the_owner_migrates(empty: Settings) -> None:
    """The worker's role cannot create tables, and is not given the right to: the setting is wrong."""
    with pytest.raises(AccessRefused, match=r"run by role tidegate_owner.*pg_owner names tidegate"):
        migrations.upgrade(replace(empty, pg_owner="tidegate"), [])


# a new pipeline

PAGE_VIEWS = '''"""Page views."""

from tidegate.jobs import ApproxDistinct, Count, Files, History, Max, Min, Pipeline, Session, State, Sum

PIPELINE = Pipeline(
    name="page_views",
    source=Files("views", glob="*.csv", format="csv", schema={"page": "string"}),
    states={
        "page_views": State(
            key={"page": "text", "day": "date"},
            aggregates={
                "views": Count(),
                "amount": Sum("amount", "numeric(20,4)"),
                "latest": Max("at", "timestamptz"),
                "wall": Min("at", "timestamp"),
                "code": Max("code", "bytea"),
            },
        ),
        "page_visitors": State(key={"visitor": "text", "id": "uuid"}, aggregates={"visits": Count()}, null_keys=True),
        "sessions": State(window=Session("at", "30 minutes", final_after="1 day", emit_final=True)),
        "page_titles": History(key={"page": "text"}, columns={"title": "text"}, order_by={"at": "timestamptz"}),
        "page_reach": State(key={"page": "text"}, aggregates={"visitors": ApproxDistinct("visitor", "text")}),
    },
)
'''
MAIN = "from tidegate.cli import main; main()"


@pytest.fixture
def author(tmp_path: Path) -> Path:
    """The folder of a project in which an author works."""
    for part in ("pipelines", "migrations"):
        (tmp_path / "author" / part).mkdir(parents=True)
    return tmp_path / "author"


@pytest.mark.promise("verb:migrate")
def test_an_author_gets_a_migration_that_works(empty: Settings, author: Path, as_role: Execute) -> None:
    """Declare, `migrate --new`, `migrate`: typed, guarded tables, downwards too; nothing is written elsewhere."""
    tree = _digest(REPOSITORY / "migrations")
    (author / "pipelines/page_views.py").write_text(PAGE_VIEWS)

    refused = _tidegate(author, empty, "migrate")
    assert refused.returncode == 1
    assert "page_views" in refused.stderr
    assert "tidegate migrate --new" in refused.stderr

    wrote = _tidegate(author, empty, "migrate", "--new", "Page views: 'two' states!")
    assert wrote.returncode == 0, wrote.stderr
    (file,) = (file.name for file in (author / "migrations").glob("*.py"))
    assert file == "0001_page_views_two_states.py"
    assert file in wrote.stdout + wrote.stderr
    assert "No migration is missing" in (again := _tidegate(author, empty, "migrate", "--new", "again")).stdout + again.stderr

    done = _tidegate(author, empty, "migrate")
    assert done.returncode == 0, done.stderr
    assert revision(empty) == "0001"
    built = shape(empty)
    assert [line for line in built["columns"] if line.startswith("state.page_v")] == [
        "state.page_views.amount numeric(20,4) true",
        "state.page_views.code bytea false",
        "state.page_views.day date true",
        "state.page_views.latest timestamp with time zone false",
        "state.page_views.page text true C",
        "state.page_views.txid bigint true",
        "state.page_views.views bigint true",
        "state.page_views.wall timestamp without time zone false",
        "state.page_visitors.id uuid false",
        "state.page_visitors.txid bigint true",
        "state.page_visitors.visitor text false C",
        "state.page_visitors.visits bigint true",
    ]
    for state in ("page_views", "page_visitors", "sessions", "sessions_final", "page_titles_versions"):
        assert any("single_writer()" in line for line in built["triggers"] if f" state.{state} " in line)
    assert any("UNIQUE NULLS NOT DISTINCT (visitor, id)" in line for line in built["constraints"])
    grants = {line.split()[0]: line for line in built["relations"]}
    assert "tidegate=arwd/" in grants["state.sessions"], "sessions that become one are taken out"
    assert "tidegate=arw/" in grants["state.page_views"]
    assert "tidegate_stager=r/" in grants["state.sessions_final"]
    assert "state.ix_sessions_window_end" in grants

    walk = (
        "from tidegate import migrations; from tidegate.state_store import Settings; migrations.walk(Settings.load(), [], '{}')"
    )
    for target in ("0000", "0001"):
        walked = _python(author, empty, walk.format(target))
        assert walked.returncode == 0, walked.stderr
    assert _tidegate(author, empty, "migrate").returncode == 0  # registration makes views
    assert shape(empty) == built
    assert _digest(REPOSITORY / "migrations") == tree


VISITS = '''"""Visits as they come."""

from tidegate.jobs import Files, Pipeline, Ranges, Rows

PIPELINE = Pipeline(
    name="visits",
    source=Files("data/visits", schema={"page": "string", "at": "timestamp", "number": "bigint"}),
    states={"visit": Rows({"page": "text", "at": "timestamptz", "number": "bigint"})},
)
'''


def test_the_ranges_of_rows_are_changed_by_a_migration(empty: Settings, author: Path) -> None:
    """Up and down, with every row and grant; a row that is in no range stops it, and nothing is changed."""

    def by_hand(statement: str, *, reads: bool = True) -> list[tuple]:
        with closing(psycopg2.connect(**empty.conninfo(user=empty.pg_owner))) as connection, connection:
            cursor = connection.cursor()
            cursor.execute("SET LOCAL tidegate.writer = 'visits'")
            cursor.execute(statement)
            return cursor.fetchall() if reads else []

    def migrated(ranges: str | None) -> None:
        declared.write_text(
            VISITS if ranges is None else VISITS.replace('"bigint"})},', f'"bigint"}}, range_partitions={ranges})}},')
        )
        for arguments in (("migrate", "--new", "visits"), ("migrate",)):
            done = _tidegate(author, empty, *arguments)
            assert done.returncode == 0, done.stderr
        again = _tidegate(author, empty, "migrate", "--new", "again")
        assert "No migration is missing" in again.stdout + again.stderr

    declared = author / "pipelines/visits.py"
    migrated(None)
    (written,) = author.glob("migrations/*_visits.py")
    assert "# ###" not in written.read_text(), "what Alembic says of a draft"
    times = ("(1, 0, 'a', '2026-01-31 23:59:59Z', -1)", "(1, 1, NULL, '2026-02-01Z', 5)", "(2, 0, 'a', '2026-02-02Z', NULL)")
    values = ", ".join(times)
    by_hand(f"INSERT INTO state.visit VALUES {values}", reads=False)
    by_hand("GRANT SELECT ON state.visit TO PUBLIC", reads=False)
    before = by_hand("SELECT * FROM state.visit ORDER BY 1, 2")
    whole = shape(empty)
    divided = "SELECT tableoid::regclass::text, count(*) FROM state.visit GROUP BY 1 ORDER BY 1"
    migrated('Ranges("at", "month")')
    assert by_hand(divided) == [('state."visit$20260101"', 1), ('state."visit$20260201"', 2)]
    migrated('Ranges("at", "day")')
    assert by_hand(divided) == [(f'state."visit${day}"', 1) for day in ("20260131", "20260201", "20260202")]
    assert by_hand("SELECT * FROM state.visit ORDER BY 1, 2") == before
    by_day = shape(empty)
    assert [line for line in by_day["relations"] if "visit$" in line and "=r/" in line] == [], "they are read by their table"
    assert any(line.startswith("state.visit ") and ",=r/" in line for line in by_day["relations"])

    declared.write_text(VISITS.replace('"bigint"})},', '"bigint"}, range_partitions=Ranges("number", 10))},'))
    assert _tidegate(author, empty, "migrate", "--new", "numbers").returncode == 0
    refused = _tidegate(author, empty, "migrate")
    assert "state visit has rows without number, by which they are to be divided" in refused.stderr
    assert shape(empty) == by_day
    by_hand("DELETE FROM state.visit WHERE number IS NULL", reads=False)
    assert _tidegate(author, empty, "migrate").returncode == 0
    assert by_hand(divided) == [('state."visit$-10"', 1), ('state."visit$0"', 1)]
    migrated(None)
    assert by_hand("SELECT * FROM state.visit ORDER BY 1, 2") == before[:2]
    walk = (
        "from tidegate import migrations; from tidegate.state_store import Settings; migrations.walk(Settings.load(), [], '{}')"
    )
    for revision_ in range(4, 0, -1):
        done = _python(author, empty, walk.format(f"{revision_:04d}"))
        assert done.returncode == 0, done.stderr
        assert by_hand("SELECT * FROM state.visit ORDER BY 1, 2") == before[:2]
    of_table = [
        {what: [line for line in found[what] if "state.visit" in line] for what in found} for found in (whole, shape(empty))
    ]
    assert of_table[0] == of_table[1]


def test_a_detached_table_in_the_way_of_new_ranges_is_named(empty: Settings, author: Path) -> None:
    """It has rows that were to be kept, so no migration takes it away; when it is gone from there, the migration goes on."""

    def by_hand(statement: str) -> None:
        with closing(psycopg2.connect(**empty.conninfo(user=empty.pg_owner))) as connection, connection:
            connection.cursor().execute(f"SET LOCAL tidegate.writer = 'visits'; {statement}")

    declared = author / "pipelines/visits.py"
    declared.write_text(VISITS)
    for arguments in (("migrate", "--new", "visits"), ("migrate",)):
        assert _tidegate(author, empty, *arguments).returncode == 0
    by_hand("INSERT INTO state.visit VALUES (1, 0, 'a', '2026-01-31Z', 1)")
    by_hand('CREATE TABLE state."visit$20260101" AS SELECT * FROM state.visit')
    declared.write_text(VISITS.replace('"bigint"})},', '"bigint"}, range_partitions=Ranges("at", "month"))},'))
    assert _tidegate(author, empty, "migrate", "--new", "months").returncode == 0
    before = shape(empty)
    refused = _tidegate(author, empty, "migrate")
    assert refused.returncode == 1
    assert 'A table is in the way while migrating: relation "visit$20260101" already exists.' in refused.stderr
    assert shape(empty) == before
    by_hand('ALTER TABLE state."visit$20260101" RENAME TO kept')
    assert _tidegate(author, empty, "migrate").returncode == 0


HOURS = '''"""Views per hour."""

from tidegate.jobs import Count, Files, Pipeline, State, Tumbling

PIPELINE = Pipeline(
    name="hours",
    source=Files("views", glob="*.csv", format="csv", schema={"page": "string", "at": "timestamp"}),
    states={"hours": State(key={"page": "text"}, aggregates={"views": Count()}, window=Tumbling("at", "1 hour", @MORE@))},
)
'''


def test_windows_may_be_kept_for_a_time_that_is_declared_later(empty: Settings, author: Path) -> None:
    """The migration makes the index by which windows are found, and lets commits delete."""

    def declare(more: str, *commands: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        (author / "pipelines/hours.py").write_text(HOURS.replace("@MORE@", more))
        done = [_tidegate(author, empty, *arguments) for arguments in commands]
        return done[-1]

    def of_table() -> list[str]:
        return [line for line in shape(empty)["relations"] if "state.hours" in line or "state.ix_hours" in line]

    new, migrate = ("migrate", "--new", "hours"), ("migrate",)
    done = declare("final_after='1 hour'", new, migrate)
    assert done.returncode == 0, done.stderr
    before = of_table()
    assert "tidegate=arw/" in before[0]

    refused = declare("final_after='1 hour', keep='9 days'", migrate)
    assert "the migrations make another table of its state hours" in refused.stderr
    done = declare("final_after='1 hour', keep='9 days'", new, migrate)
    assert done.returncode == 0, done.stderr
    assert any(line.startswith("state.ix_hours_window_end") for line in of_table())
    assert "tidegate=arwd/" in of_table()[0]
    again = _tidegate(author, empty, *new)
    assert "No migration is missing" in again.stdout + again.stderr


A_ROW = """
    SET tidegate.writer = 'visits';
    INSERT INTO state.visit (txid, position, page, at, number) VALUES (1, 0, 'a', '2026-01-31Z', 1);
"""
ENABLED = """
    SELECT tgname::text, tgenabled::text FROM pg_trigger WHERE tgrelid = 'state.visit'::regclass AND NOT tgisinternal
    UNION ALL SELECT pg_get_statisticsobjdef(oid), '' FROM pg_statistic_ext WHERE stxrelid = 'state.visit'::regclass
    UNION ALL SELECT pg_get_indexdef(indexrelid), '' FROM pg_index
        WHERE indrelid = 'state.visit'::regclass AND indexrelid = 'state.by_number'::regclass
    UNION ALL SELECT 'replica identity', relreplident::text FROM pg_class WHERE oid = 'state.visit'::regclass
    UNION ALL SELECT attname, attstattarget::text FROM pg_attribute
        WHERE attrelid = 'state.visit'::regclass AND attstattarget > 0
"""
BY_HAND = """
    GRANT SELECT (number), UPDATE (number) ON state.visit TO tidegate_stager;
    REVOKE SELECT ON state.visit FROM tidegate_reader;
    GRANT REFERENCES ON state.visit TO PUBLIC;
    CREATE TRIGGER noted BEFORE UPDATE OF number ON state.visit
        FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger();
    CREATE TRIGGER unused BEFORE UPDATE ON state.visit FOR EACH STATEMENT EXECUTE FUNCTION tidegate.single_writer();
    ALTER TABLE state.visit DISABLE TRIGGER unused;
    CREATE TABLE public.pages (page text COLLATE "C" PRIMARY KEY);
    INSERT INTO public.pages VALUES ('a');
    ALTER TABLE state.visit ADD CONSTRAINT a_page FOREIGN KEY (page) REFERENCES public.pages;
    ALTER TABLE state.visit ADD CONSTRAINT few CHECK (number < 1000 AND page <> '%:x');
    ALTER TABLE state.visit ADD CONSTRAINT once UNIQUE (page, at, number);
    CREATE INDEX by_number ON state.visit (number) WHERE page <> 'on only';
    CREATE STATISTICS state.together (dependencies) ON page, number FROM state.visit;
    ALTER TABLE state.visit ALTER number SET STATISTICS 50;
    COMMENT ON TABLE state.visit IS 'What was viewed, ours''s';
    COMMENT ON COLUMN state.visit.number IS 'how often';
    ALTER TABLE state.visit REPLICA IDENTITY FULL;
"""
BY_MONTH = VISITS.replace('"bigint"})},', '"bigint"}, range_partitions=Ranges("at", "month"))},')


def test_a_table_that_is_divided_keeps_what_it_had(empty: Settings, author: Path) -> None:
    """Exactly its privileges, its triggers, and what an administrator gave it; up and down."""

    def migrate(declared: str, *commands: tuple[str, ...]) -> None:
        (author / "pipelines/visits.py").write_text(declared)
        for arguments in commands:
            done = _tidegate(author, empty, *arguments)
            assert done.returncode == 0, done.stderr

    def by_hand(statement: str) -> list[tuple]:
        settings = empty.conninfo(user=empty.pg_owner)
        with closing(psycopg2.connect(**settings)) as connection, connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def found() -> dict[str, list[str]]:
        """Return all but what says that the table is divided, and by which migration."""
        lines = {
            what: [line for line in of if "$" not in line and "alembic_version" not in line]
            for what, of in shape(empty).items()
        }
        lines["constraints"] = [re.sub(r"_not_null\d+", "_not_null", line) for line in lines["constraints"]]
        lines["constraints"] = [line for line in lines["constraints"] if "pk_visit" not in line and "visit_at_not" not in line]
        dividing = ("state.visit.at ", "state.pk_visit.at ")  # it is part of the key of a divided table
        lines["columns"] = [line for line in lines["columns"] if not line.startswith(dividing)]
        lines["relations"] = [re.sub(r"^(state\.\w+) \w", r"\1 ", line) for line in lines["relations"]]
        given = [(what.replace(" ON ONLY ", " ON "), how) for what, how in by_hand(ENABLED)]
        return lines | {"enabled": sorted(given)}

    migrate(VISITS, ("migrate", "--new", "visits"), ("migrate",))
    by_hand(BY_HAND)
    by_hand(A_ROW)
    before, rows = found(), by_hand("SELECT * FROM state.visit")

    migrate(BY_MONTH, ("migrate", "--new", "divided"))
    migrate(BY_MONTH, ("migrate", "--new", "nothing is missing"))  # runs migrations, and registers nothing
    assert found() == before
    assert by_hand("SELECT * FROM state.visit") == rows
    assert len(by_hand("SELECT inhrelid FROM pg_inherits WHERE inhparent = 'state.visit'::regclass")) == 1
    parts = [line for line in shape(empty)["relations"] if line.startswith('state."visit$')]
    assert not any("tidegate_reader" in line for line in parts), "a partition is not readable where the table is not"
    migrate(BY_MONTH, ("migrate",))
    assert found() == before

    walk = "from tidegate.state_store import Settings; migrations.walk(Settings.load(), [], '0001')"
    assert _python(author, empty, f"from tidegate import migrations; {walk}").returncode == 0
    assert found() == before
    assert by_hand("SELECT * FROM state.visit") == rows


# What a team has given to a table, and how it is taken back.
IN_THE_WAY = {
    "publication": ("CREATE PUBLICATION subscribed FOR TABLE state.visit", "DROP PUBLICATION subscribed"),
    "rule": (
        "CREATE RULE noted AS ON INSERT TO state.visit DO ALSO NOTIFY pages",
        "DROP RULE noted ON state.visit",
    ),
    "constraint": (
        "ALTER TABLE state.visit ADD CONSTRAINT once UNIQUE (number)",
        "ALTER TABLE state.visit DROP CONSTRAINT once",
    ),
}
SAID = {
    "publication": "state.visit is in a publication",
    "rule": "state.visit has a rule",
    "constraint": "state.visit cannot have any more .*(ALTER TABLE state.visit ADD CONSTRAINT once UNIQUE (number))",
}


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_what_a_table_that_is_made_again_would_lack_stops_the_migration(empty: Settings, author: Path, what: str) -> None:
    """It is named, and nothing is changed; without it, the same migration goes on."""

    def by_hand(statement: str) -> list[tuple]:
        connection = psycopg2.connect(**empty.conninfo(user=empty.pg_owner))
        with closing(connection), connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    declared = author / "pipelines/visits.py"
    declared.write_text(VISITS)
    for arguments in (("migrate", "--new", "visits"), ("migrate",)):
        done = _tidegate(author, empty, *arguments)
        assert done.returncode == 0, done.stderr
    made, gone = IN_THE_WAY[what]
    by_hand(made)
    declared.write_text(BY_MONTH)
    assert _tidegate(author, empty, "migrate", "--new", "divided").returncode == 0
    refused = _tidegate(author, empty, "migrate")
    assert refused.returncode == 1
    before, _, after = SAID[what].partition(".*")
    assert before in refused.stderr, refused.stderr
    assert after in refused.stderr, refused.stderr
    assert by_hand("SELECT relkind::text FROM pg_class WHERE oid = 'state.visit'::regclass") == [("r",)]
    by_hand(gone)
    done = _tidegate(author, empty, "migrate")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("force", [True, False], ids=["forced", "not for the owner"])
def test_a_table_with_row_level_security_is_not_made_again(empty: Settings, author: Path, force: bool) -> None:
    """The copy would lack the rows that are hidden from the owner, or show everybody those that are hidden from readers."""

    def by_hand(*statements: str) -> None:
        connection = psycopg2.connect(**empty.conninfo(user=empty.pg_owner))
        with closing(connection), connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def rows() -> list[tuple]:
        with closing(psycopg2.connect(**empty.conninfo(user=empty.pg_reader))) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT page, number FROM state.visit ORDER BY 1")
            return cursor.fetchall()

    declared = author / "pipelines/visits.py"
    declared.write_text(VISITS)
    for arguments in (("migrate", "--new", "visits"), ("migrate",)):
        done = _tidegate(author, empty, *arguments)
        assert done.returncode == 0, done.stderr
    by_hand(
        "SET LOCAL tidegate.writer = 'visits'",
        "INSERT INTO state.visit SELECT 1, n, 'p', '2026-01-01Z', n FROM generate_series(1, 1000) AS n",
        "ALTER TABLE state.visit ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY of_readers ON state.visit FOR SELECT TO tidegate_reader USING (number <= 10)",
        *(["ALTER TABLE state.visit FORCE ROW LEVEL SECURITY"] if force else []),
    )
    before = rows()
    assert len(before) == 10

    declared.write_text(BY_MONTH)
    assert _tidegate(author, empty, "migrate", "--new", "divided").returncode == 0
    refused = _tidegate(author, empty, "migrate")
    assert refused.returncode != 0
    assert "row-level security" in refused.stderr
    assert rows() == before

    by_hand(
        "DROP POLICY of_readers ON state.visit",
        "ALTER TABLE state.visit DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY",
    )
    done = _tidegate(author, empty, "migrate")
    assert done.returncode == 0, done.stderr
    assert len(rows()) == 1000


def test_code_from_before_an_update_is_refused_by_a_ledger_of_newer_code(empty: Settings, tmp_path: Path) -> None:
    """The files say nothing about loaded code: it knows the ledger that it was started with."""
    code = copy_to(tmp_path / "code")
    program = (
        "from tidegate.state_store import Settings, StateStore; print(flush=True); input(); StateStore.connect(Settings.load())"
    )
    started = subprocess.Popen(
        **_command(tmp_path, empty, program, code=code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    started.stdout.readline()  # it has imported its code
    with (code / "state_store/ledger/schema.sql").open("a") as schema:
        schema.write("\nCOMMENT ON SCHEMA tidegate IS 'newer';\n")
    migrate = (
        "from tidegate import migrations; from tidegate.state_store import Settings; migrations.upgrade(Settings.load(), [])"
    )
    migrated = _python(tmp_path, empty, migrate, code=code)
    assert migrated.returncode == 0, migrated.stderr

    _, message = started.communicate("\n", timeout=60)

    assert started.returncode != 0
    assert f"than this process was started with ({schema_revision.DIGEST})" in message
    assert "restart the stack: tidegate down && tidegate up" in message
    again = _python(tmp_path, empty, program.replace("input(); ", ""), code=code)
    assert again.returncode == 0, again.stderr


def _tidegate(folder: Path, settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _python(folder, settings, MAIN, *arguments)


def _python(
    folder: Path, settings: Settings, program: str, *arguments: str, code: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """Run Python in a project, or in no project, on the test's database."""
    command = _command(folder, settings, program, *arguments, code=code)
    return subprocess.run(**command, capture_output=True, timeout=400, check=False)


def _command(folder: Path, settings: Settings, program: str, *arguments: str, code: Path) -> dict[str, Any]:
    where = settings.conninfo()
    environment = {
        **os.environ,
        "PYTHONPATH": str(code),
        "TIDEGATE_HOME": str(folder),
        "PGHOST": where["host"],
        "PGPORT": str(where["port"]),
        "PGDATABASE": where["dbname"],
        "PGPASSFILE": where["passfile"],
    }
    return {"args": [sys.executable, "-c", program, *arguments], "cwd": folder, "env": environment, "text": True}


def _digest(folder: Path) -> dict[str, str]:
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.rglob("*.py"))}
