"""Migrations lead from an empty database to the declared tables and back, in one line, with clear refusals."""

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
from tests.conftest import Server
from tests.integration.conftest import Execute, Tally, until
from tidegate import migrations
from tidegate.jobs.registry import all_pipelines
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import AccessRefused, SchemaOutOfDate, StoreUnavailable, TidegateError
from tidegate.state_store.declarations.column_spec import ColumnType, KeyColumn, ValueColumn
from tidegate.state_store.ledger import schema_revision, tables
from tidegate.state_store.states import state_tables

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = sorted(file.name for file in schema_revision.VERSIONS.glob("*.py"))
REVISIONS = [name[:4] for name in FILES]
SPECS = [pipeline.spec for pipeline in all_pipelines()]


@pytest.fixture
def empty(server: Server, tmp_path: Path) -> Iterator[Settings]:
    """Settings with an empty database."""
    name = server.create_database()
    yield replace(server.settings, pg_database=name, home=tmp_path)
    server.drop_database(name)


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
    """Return a database's revision."""
    with migrations.connected(settings) as connection:
        return schema_revision.current_revision(connection)


# the files


@pytest.mark.parametrize("name", FILES)
def test_a_migrations_name_has_its_number(name: str) -> None:
    """NNNN_what_it_does.py, numbered without gaps, each the successor of the previous; its docstring says why."""
    assert re.fullmatch(r"\d{4}_[a-z][a-z0-9_]*\.py", name)
    number = FILES.index(name) + 1
    assert int(name[:4]) == number
    content = (schema_revision.VERSIONS / name).read_text()
    previous = f'"{number - 1:04d}"' if number > 1 else "None"
    assert re.search(rf'^revision = "{number:04d}"$', content, re.MULTILINE)
    assert re.search(rf"^down_revision = {previous}$", content, re.MULTILINE)
    assert re.match(r'"""[A-Z].+\."""\n', content)


@pytest.mark.parametrize("name", FILES)
def test_a_migration_imports_none_of_tidegates_code(name: str) -> None:
    """History is frozen: it must not change when the code does."""
    imports = re.findall(r"^(?:from|import) (\w+)", (schema_revision.VERSIONS / name).read_text(), re.MULTILINE)
    assert set(imports) <= {"sqlalchemy", "alembic"}


# up and down


def test_an_upgrade_builds_the_declared_tables(empty: Settings) -> None:
    """The first call builds everything and registers the pipelines; the second finds nothing to do."""
    assert migrations.upgrade(empty, SPECS) == (REVISIONS[-1], [spec.name for spec in SPECS])
    built = shape(empty)
    with StateStore.connect(empty) as store:
        assert [lag.pipeline for lag in store.lag()] == sorted(spec.name for spec in SPECS)

    assert migrations.upgrade(empty, SPECS) == (REVISIONS[-1], [])
    assert shape(empty) == built


def test_the_checked_in_migrations_create_the_declared_tables(empty: Settings) -> None:
    """Not one column, type, default, constraint or comment is missing or left over."""
    migrations.upgrade(empty, [])
    assert migrations.new_revision(empty, SPECS, "nothing") is None
    assert sorted(file.name for file in schema_revision.VERSIONS.glob("*.py")) == FILES


def test_state_tables_of_migrations_equal_those_of_declarations(empty: Settings, server: Server) -> None:
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


@pytest.mark.sampled(6)
@pytest.mark.parametrize("target", REVISIONS)
def test_every_step_goes_down_and_up_again(empty: Settings, target: str) -> None:
    """Each revision leaves nothing when it is undone, and comes back the same."""
    before = f"{int(target) - 1:04d}"
    if before != "0000":
        migrations.walk(empty, [], before)
    below = shape(empty)
    migrations.walk(empty, [], target)
    above = shape(empty)
    assert above != below

    migrations.walk(empty, [], before)
    assert revision(empty) == (None if before == "0000" else before)
    if before == "0000":
        assert [name for name in shape(empty)["relations"] if "alembic_version" not in name] == []
    else:
        assert shape(empty) == below

    migrations.walk(empty, [], target)
    assert shape(empty) == above


def test_all_the_way_down_and_up_again(empty: Settings) -> None:
    """A database that held registered pipelines and batches can be emptied and filled again."""
    migrations.upgrade(empty, SPECS)
    built = shape(empty)
    with StateStore.connect(empty) as store:
        store.open_batches(SPECS[0], "run", [], None, [b"{}"])
    migrations.walk(empty, [], "0000")
    with pytest.raises(SchemaOutOfDate, match="has no Tidegate tables"):
        StateStore.connect(empty)
    migrations.upgrade(empty, SPECS)
    assert shape(empty) == built


def test_failures_that_older_code_took_for_poison_are_not_tries_any_more(tally: Tally, settings: Settings) -> None:
    """Its ledger blames a batch for a server that died: with the next bad record the batch would be given up."""
    tally.plan(1)
    for error in ("SPARK_FAILED: [RESPONSE_ALREADY_RECEIVED]", "SOURCE_CHANGED: 1.csv is gone", "MALFORMED_RECORD: line 3"):
        tally.store.fail_attempt(tally.start(1), error, is_poison=True)
    migrations.walk(settings, [], "0010")

    migrations.upgrade(settings, [])

    assert tally.store.poison_tries("tally", 1) == 1
    tally.process(1)
    assert tally.commit(1).attempt == 4


def test_batches_of_every_phase_come_through_the_migration_of_kinds(tally: Tally, settings: Settings) -> None:
    """Downgraded to 0004, the ledger is like that of older code; upgraded again, its chain holds and work goes on."""
    tally.plan(5)
    tally.process(1, [("a", 1, 5, 5, 5)])
    tally.commit(1)
    tally.store.fail_attempt(tally.start(2), "MALFORMED_RECORD: a.csv, line 3")
    tally.store.skip_batch(tally.spec, 2, "an operator", "cut off")
    tally.process(3, [("a", 1, 7, 7, 7)])
    tally.store.fail_attempt(tally.start(4), "SPARK_FAILED: it broke", is_poison=True)
    before = ledger(settings)

    migrations.walk(settings, [], "0004")
    assert "previous_digest" not in ledger(settings)["batch"][0]
    migrations.walk(settings, [], "0005")

    after = ledger(settings)
    for row in before["attempt"]:
        row["is_poison"] = None if row["failed_at"] is None else False  # older code did not record it
        row.update(staged_at=None, quarantined_rows=None)
        del row["seen_at"]  # nor heartbeats
        del row["source_hash_sum"], row["transformed_hash_sum"]  # older code had XORs
    for row in before["batch"]:
        row.update(skip_owner=None, skip_reason=None)  # older code recorded these only in the commit
        del row["awaits_ack"], row["acked_at"]  # older code had no acks
    for row in before["cursor"]:
        row["epoch"] = row["epoch"].rpartition("/")[0]  # older code did not notice copies within the server
        del row["history"]
    for row in before["commit"]:
        row["merged_at"] = row["committed_at"]
    before["operator_action"] = []
    for name in ("source_file", "open_commit", "check_result", "watermark", "state_range", "plan"):
        del before[name]  # older code had no such tables
    for row in before["pipeline"]:
        del row["in_flight"], row["commits_alone"]
        del row["retired_at"], row["retired_by"], row["retired_reason"]
    for row in before["state_table"]:
        del row["pruned_txid"], row["dropped_at"]  # older code removed no changes, and no tables
        del row["table_oid"]  # nor did it note which these are
    assert after == before
    digests = [None, *(row["source_digest"] for row in after["batch"])]
    assert [row["previous_digest"] for row in after["batch"]] == digests[:-1]
    migrations.upgrade(settings, [])
    assert [(row["pipeline"], row["succeeded"], row["failed"]) for row in ledger(settings)["plan"]] == [("tally", 0, 0)]
    assert tally.commit(3).attempt == 1
    tally.process(4, [("b", 1, 2, 2, 2)])
    tally.commit(4)
    tally.process(5)
    tally.commit(5)
    tally.plan(run_id="next")
    tally.process(6)
    tally.commit(6)
    assert tally.state() == [("a", 2, 12, 5, 7, 3), ("b", 1, 2, 2, 2, 4)]


def ledger(settings: Settings) -> dict[str, list[dict]]:
    """Return every row of the ledger's tables, in the order of their keys."""
    with migrations.connected(settings) as connection:
        found = sa.MetaData(schema=tables.LEDGER)
        found.reflect(connection)
        return {
            table.name: [dict(row) for row in connection.execute(sa.select(table).order_by(*table.primary_key)).mappings()]
            for table in found.sorted_tables
            if table.name != schema_revision.VERSION_TABLE
        }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("UPDATE tidegate.pipeline SET source_kind = 'opaque'", "ck_pipeline_source_kind"),
        (
            "INSERT INTO tidegate.quarantine (pipeline, txid, number, reason, payload, is_raw) "
            "VALUES ('tally', 1, 1, 'bad', '?', true)",
            "records are in quarantine",
        ),
        ("INSERT INTO tidegate.watermark (state, pipeline, txid) VALUES ('x', 'tally', 1)", "states with windows have counted"),
        (
            "INSERT INTO tidegate.watermark (state, pipeline, txid, removed_until) VALUES ('x', 'tally', 1, now())",
            "windows were removed",
        ),
    ],
    ids=["an opaque pipeline", "a record in quarantine", "windows", "removed windows"],
)
def test_a_downgrade_that_would_lose_data_is_refused(
    tally: Tally, settings: Settings, as_role: Execute, content: str, message: str
) -> None:
    """Older code does not know these rows: the downgrade is refused, and nothing is done."""
    tally.plan()
    as_role("tidegate_owner", content)
    before = shape(settings)
    with pytest.raises(TidegateError, match=message):
        migrations.walk(settings, [], "0004")
    assert shape(settings) == before


# refusals


def test_a_state_without_a_migration_is_refused_and_nothing_is_done(empty: Settings) -> None:
    """One sentence names the pipeline, its state and the command; the database stays as empty as it was."""
    (state,) = SPECS[0].states
    extra = replace(SPECS[0], name="extra", states=(replace(state, name="extra_state"),))
    with pytest.raises(SchemaOutOfDate) as refused:
        migrations.upgrade(empty, [*SPECS, extra])
    assert str(refused.value) == (
        "Pipeline extra is not registered: no migration creates its state extra_state. Write the missing migration: "
        "tidegate migrate --new 'what changed', then run: tidegate migrate"
    )
    assert revision(empty) is None


def test_a_pipeline_without_a_migration_does_not_stop_the_others(empty: Settings) -> None:
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
    assert "belongs to pipeline flights: a state has one writer" in broken["rival"]
    assert set(broken) == {"extra", counts.name, "rival"}
    with StateStore.connect(empty) as store:
        assert [lag.pipeline for lag in store.lag()] == [daily.name]
    with pytest.raises(SchemaOutOfDate, match=r"belongs to pipeline flights: a state has one writer. Rename one of them"):
        migrations.new_revision(empty, [daily, rival], "two pipelines with a state of one name")


@pytest.mark.parametrize("upgrade", [migrations.upgrade, migrations.upgrade_all_but_broken])
def test_a_state_moves_to_a_pipeline_that_is_named_first(empty: Settings, upgrade: Callable[..., Any]) -> None:
    """Its former owner is registered before the new one, in the same migration."""
    daily, counts = SPECS
    upgrade(empty, SPECS)
    without = replace(counts, states=(replace(counts.states[0], name="noted", updates=True),))
    moved = [replace(daily, states=(*daily.states, *counts.states)), without]
    assert upgrade(empty, moved) in ({}, (REVISIONS[-1], [counts.name, daily.name]))
    with migrations.connected(empty) as connection:
        assert set(connection.scalars(sa.select(tables.state_table.c.pipeline))) == {daily.name}


CHANGED = {
    "key added": {"keys": (*SPECS[0].states[0].keys, KeyColumn("more", ColumnType("text")))},
    "value added": {"values": (*SPECS[0].states[0].values, ValueColumn("more", ColumnType("bigint"), "sum"))},
    "value removed": {"values": SPECS[0].states[0].values[1:]},
    "value type": {"values": tuple(replace(value, type=ColumnType("numeric(38,2)")) for value in SPECS[0].states[0].values)},
    "hash partitions": {"hash_partitions": 4},
    "keys nullable": {"keys": tuple(replace(key, nullable=True) for key in SPECS[0].states[0].keys)},
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED.keys())
def test_a_state_that_differs_from_its_migrations_is_refused(empty: Settings, change: dict) -> None:
    """The comparison sees every kind of change that a declaration can make."""
    changed = replace(SPECS[0], states=(replace(SPECS[0].states[0], **change), *SPECS[0].states[1:]))
    with pytest.raises(SchemaOutOfDate, match="tidegate migrate --new"):
        migrations.upgrade(empty, [changed, *SPECS[1:]])


def test_a_database_of_newer_code_is_left_alone(settings: Settings, as_role: Execute) -> None:
    """Old code does not migrate it, and says that the code has to be updated."""
    as_role("tidegate_owner", "UPDATE tidegate.alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaOutOfDate, match=r"is at revision 9999, newer than this code.*Update the code\."):
        migrations.upgrade(settings, SPECS)


def test_a_table_in_use_delays_a_migration_by_seconds_only(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting ALTER would delay every later merge: it gives up, changes nothing, and may be tried again."""
    monkeypatch.setattr(migrations, "DDL_LOCK_TIMEOUT_SECONDS", 0.2)
    with closing(psycopg2.connect(**settings.conninfo())) as reader, reader.cursor() as cursor:
        cursor.execute("SELECT FROM state.daily")
        with pytest.raises(StoreUnavailable, match="migrating: a lock timeout"):
            migrations.walk(settings, [], "0001")
    assert revision(settings) == REVISIONS[-1]


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


def test_two_migrations_at_once_are_one(settings: Settings, waiting: Callable[[], int]) -> None:
    """Such as `tidegate up` beside `tidegate migrate`: the second waits, and finds nothing to do."""
    migrations.walk(settings, [], REVISIONS[-2])
    with ThreadPoolExecutor(1) as pool:
        with migrations.connected(settings) as connection:
            assert migrations._upgrade(connection, [], may_wait=False).refused == {}
            second = pool.submit(migrations.upgrade, settings, [])
            until(waiting)
        assert second.result(30) == (REVISIONS[-1], [])
    assert revision(settings) == REVISIONS[-1]


def test_the_owners_search_path_does_not_hide_the_tables(settings: Settings, as_role: Execute) -> None:
    """It may well name Tidegate's schemas, for people who use psql."""
    as_role("postgres", f"ALTER ROLE tidegate_owner IN DATABASE {settings.pg_database} SET search_path = tidegate, state")
    again = replace(settings, lock_timeout_seconds=58)  # with connections of its own
    assert migrations.upgrade(again, [])[0] == REVISIONS[-1]
    assert migrations.upgrade(again, SPECS)[1] == sorted(spec.name for spec in SPECS)
    assert migrations.upgrade(again, SPECS) == (REVISIONS[-1], [])


def test_only_the_owner_migrates(empty: Settings) -> None:
    """The worker's role cannot create tables, and is not given the right to: the setting is wrong."""
    with pytest.raises(AccessRefused, match=r"run by role tidegate_owner.*pg_owner names tidegate"):
        migrations.upgrade(replace(empty, pg_owner="tidegate"), [])


def test_dropping_the_ledger_stops_before_a_state_table(settings: Settings, as_role: Execute) -> None:
    """A table that no migration removes keeps its data, and so does everything around it."""
    as_role("tidegate_owner", "CREATE TABLE state.kept AS SELECT 1 AS a")
    before = shape(settings)
    with pytest.raises(Exception, match="cannot drop schema state"):
        migrations.walk(settings, [], "0000")
    assert shape(settings) == before


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
def clone(tmp_path: Path) -> Path:
    """A copy of the code that a test may change."""
    copy_to(tmp_path)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    return tmp_path


def test_an_author_gets_a_migration_that_works(empty: Settings, clone: Path, as_role: Execute) -> None:
    """Declare, `migrate --new`, `migrate`: typed, guarded tables, downwards too; nothing is written elsewhere."""
    tree = _digest(REPOSITORY / "migrations")
    (clone / "jobs/pipelines/page_views.py").write_text(PAGE_VIEWS)

    refused = _tidegate(clone, empty, "migrate")
    assert refused.returncode == 1
    assert "page_views" in refused.stderr
    assert "tidegate migrate --new" in refused.stderr

    wrote = _tidegate(clone, empty, "migrate", "--new", "Page views: 'two' states!")
    assert wrote.returncode == 0, wrote.stderr
    (file,) = {file.name for file in (clone / "migrations/versions").glob("*.py")} - set(FILES)
    number = f"{len(FILES) + 1:04d}"
    assert file == f"{number}_page_views_two_states.py"
    assert file in wrote.stdout + wrote.stderr
    assert "No migration is missing" in (again := _tidegate(clone, empty, "migrate", "--new", "again")).stdout + again.stderr

    done = _tidegate(clone, empty, "migrate")
    assert done.returncode == 0, done.stderr
    assert revision(empty) == number
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

    with pytest.raises(SchemaOutOfDate, match="newer than this code"):
        StateStore.connect(empty)  # the code beside the clone does not know that revision
    walk = (
        "from tidegate import migrations; from tidegate.state_store import Settings; migrations.walk(Settings.load(), [], '{}')"
    )
    for target in (f"{len(FILES):04d}", number):
        walked = _python(clone, empty, walk.format(target))
        assert walked.returncode == 0, walked.stderr
    assert _tidegate(clone, empty, "migrate").returncode == 0  # registration makes views
    assert shape(empty) == built
    assert _digest(REPOSITORY / "migrations") == tree


DIVIDED = ("page_views", "page_visitors", "page_titles_versions", "page_reach")
ROWS = """
    SET tidegate.writer = 'page_views';
    INSERT INTO state.page_views (page, day, views, amount, txid)
        SELECT 'p' || n, '2026-01-01', n, n / 4.0, 1 FROM generate_series(1, 1000) AS n;
    INSERT INTO state.page_visitors (visitor, id, visits, txid)
        SELECT nullif('v' || n, 'v7'), NULL, n, 1 FROM generate_series(1, 1000) AS n;
    INSERT INTO state.page_titles_versions (page, at, title, txid)
        SELECT 'p' || n % 10, timestamptz '2026-01-01Z' + n * interval '1 day', 't' || n, 1 FROM generate_series(1, 100) AS n;
"""


def test_the_number_of_hash_partitions_is_changed_by_a_migration(empty: Settings, clone: Path, as_role: Execute) -> None:
    """Up and down, with every row, view, trigger and grant; a partition has the table's only writer, too."""

    def rows() -> list[list[tuple]]:
        with closing(psycopg2.connect(**empty.conninfo(user=empty.pg_reader))) as connection, connection.cursor() as cursor:
            found = []
            views = ["page_titles"] if any("page_titles v" in line for line in shape(empty)["relations"]) else []
            for table in (*DIVIDED, *views):
                cursor.execute(f"SELECT * FROM state.{table} ORDER BY 1, 2, 3")
                found.append(cursor.fetchall())
            return found

    def of_table(found: dict[str, list[str]], table: str) -> dict[str, list[str]]:
        return {what: [line for line in lines if f"state.{table}" in line] for what, lines in found.items()}

    declared = clone / "jobs/pipelines/page_views.py"
    declared.write_text(PAGE_VIEWS)
    for arguments in (("migrate", "--new", "pages"), ("migrate",)):
        done = _tidegate(clone, empty, *arguments)
        assert done.returncode == 0, done.stderr
    with closing(psycopg2.connect(**empty.conninfo(user=empty.pg_owner))) as connection, connection:
        connection.cursor().execute(ROWS)
    whole, before = shape(empty), rows()

    divided = PAGE_VIEWS.replace("key={", "hash_partitions=3, key={")
    declared.write_text(divided)
    refused = _tidegate(clone, empty, "migrate")
    assert "make another table of its state page_reach, page_titles_versions, page_views, page_visitors" in refused.stderr
    for arguments in (("migrate", "--new", "divided"), ("migrate",)):
        done = _tidegate(clone, empty, *arguments)
        assert done.returncode == 0, done.stderr
    again = _tidegate(clone, empty, "migrate", "--new", "again")
    assert "No migration is missing" in again.stdout + again.stderr
    assert rows() == before
    built = shape(empty)
    for table in DIVIDED:
        assert any(line.startswith(f"state.{table} p") for line in built["relations"])
        parts = [line for line in built["relations"] if line.startswith(f'state."{table}$') and "fillfactor=75" in line]
        assert len(parts) == 3
        assert sum("single_writer()" in line and f"{table}$" in line for line in built["triggers"]) == 3
    with closing(psycopg2.connect(**empty.conninfo())) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_user_tables WHERE relname LIKE '%$before'")
        assert cursor.fetchone() == (0,)
        with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="by the commits of pipeline page_views only"):
            cursor.execute('UPDATE state."page_views$1" SET views = 0')

    walk = (
        "from tidegate import migrations; from tidegate.state_store import Settings; migrations.walk(Settings.load(), [], '{}')"
    )
    assert _python(clone, empty, walk.format(f"{len(FILES) + 1:04d}")).returncode == 0
    assert rows() == before[:-1], "the view of a history is gone until its pipeline is registered"
    assert of_table(shape(empty), "page_views") == of_table(whole, "page_views")
    assert _tidegate(clone, empty, "migrate").returncode == 0
    assert shape(empty) == built
    assert rows() == before

    declared.write_text(PAGE_VIEWS.replace("key={", "hash_partitions=5, key={"))
    for arguments in (("migrate", "--new", "more"), ("migrate",)):
        done = _tidegate(clone, empty, *arguments)
        assert done.returncode == 0, done.stderr
    assert rows() == before
    parts = [line for line in shape(empty)["relations"] if "$" in line and "fillfactor=75" in line]
    assert len(parts) == 5 * len(DIVIDED), "and none of the three before"
    assert _python(clone, empty, walk.format(f"{len(FILES) + 2:04d}")).returncode == 0
    declared.write_text(divided)
    assert rows() == before[:-1]
    assert of_table(shape(empty), "page_views") == of_table(built, "page_views")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["DETACH PARTITION", "DROP"])
def test_a_table_that_lacks_a_hash_partition_is_not_made_again(empty: Settings, clone: Path, how: str) -> None:
    """The rows of a detached or dropped partition are not left out of a new table, not even by a migration written before."""

    def by_hand(statement: str) -> None:
        with closing(psycopg2.connect(**empty.conninfo(user=empty.pg_owner))) as connection, connection:
            connection.cursor().execute(statement)

    declared = clone / "jobs/pipelines/page_views.py"
    for number, steps in ((3, [("migrate", "--new", "pages"), ("migrate",)]), (2, [("migrate", "--new", "fewer")])):
        declared.write_text(PAGE_VIEWS.replace("key={", f"hash_partitions={number}, key={{"))
        for arguments in steps:
            done = _tidegate(clone, empty, *arguments)
            assert done.returncode == 0, done.stderr
    table = "ALTER TABLE state.page_views "
    parts = [f'state."page_views${remainder}"' for remainder in range(3)]

    by_hand(table + "DETACH PARTITION " + parts[1] if how == "DETACH PARTITION" else "DROP TABLE " + parts[1])
    before = shape(empty)
    for arguments in (("migrate", "--new", "more"), ("migrate",)):
        refused = _tidegate(clone, empty, *arguments)
        assert refused.returncode != 0
        assert "Table state.page_views is not divided" in refused.stderr
        assert "it has 2 of 3." in refused.stderr
        assert "ATTACH PARTITION" in refused.stderr
    assert shape(empty) == before
    by_hand(table + "DETACH PARTITION " + parts[0] + "; " + table + "DETACH PARTITION " + parts[2])
    assert "it has none." in _tidegate(clone, empty, "migrate").stderr

    if how == "DETACH PARTITION":
        for remainder, part in enumerate(parts):
            by_hand(table + f"ATTACH PARTITION {part} FOR VALUES WITH (MODULUS 3, REMAINDER {remainder})")
        assert _tidegate(clone, empty, "migrate").returncode == 0
        assert sum("page_views$" in line and "fillfactor" in line for line in shape(empty)["relations"]) == 2


VISITS = '''"""Visits as they come."""

from tidegate.jobs import Files, Pipeline, Ranges, Rows

PIPELINE = Pipeline(
    name="visits",
    source=Files("data/visits", schema={"page": "string", "at": "timestamp", "number": "bigint"}),
    states={"visit": Rows({"page": "text", "at": "timestamptz", "number": "bigint"})},
)
'''


def test_the_ranges_of_rows_are_changed_by_a_migration(empty: Settings, clone: Path) -> None:
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
            done = _tidegate(clone, empty, *arguments)
            assert done.returncode == 0, done.stderr
        again = _tidegate(clone, empty, "migrate", "--new", "again")
        assert "No migration is missing" in again.stdout + again.stderr

    declared = clone / "jobs/pipelines/visits.py"
    migrated(None)
    (written,) = clone.glob("migrations/versions/*_visits.py")
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
    assert sum('"visit$' in line and "=r/" in line for line in by_day["relations"]) == 3, "each has the grant to all"

    declared.write_text(VISITS.replace('"bigint"})},', '"bigint"}, range_partitions=Ranges("number", 10))},'))
    assert _tidegate(clone, empty, "migrate", "--new", "numbers").returncode == 0
    refused = _tidegate(clone, empty, "migrate")
    assert "state visit has rows without number, by which they are to be divided" in refused.stderr
    assert shape(empty) == by_day
    by_hand("DELETE FROM state.visit WHERE number IS NULL", reads=False)
    assert _tidegate(clone, empty, "migrate").returncode == 0
    assert by_hand(divided) == [('state."visit$-10"', 1), ('state."visit$0"', 1)]
    migrated(None)
    assert by_hand("SELECT * FROM state.visit ORDER BY 1, 2") == before[:2]
    walk = (
        "from tidegate import migrations; from tidegate.state_store import Settings; migrations.walk(Settings.load(), [], '{}')"
    )
    for revision_ in range(len(FILES) + 4, len(FILES), -1):
        done = _python(clone, empty, walk.format(f"{revision_:04d}"))
        assert done.returncode == 0, done.stderr
        assert by_hand("SELECT * FROM state.visit ORDER BY 1, 2") == before[:2]
    of_table = [
        {what: [line for line in found[what] if "state.visit" in line] for what in found} for found in (whole, shape(empty))
    ]
    assert of_table[0] == of_table[1]


def test_a_detached_table_in_the_way_of_new_ranges_is_named(empty: Settings, clone: Path) -> None:
    """It has rows that were to be kept, so no migration takes it away; when it is gone from there, the migration goes on."""

    def by_hand(statement: str) -> None:
        with closing(psycopg2.connect(**empty.conninfo(user=empty.pg_owner))) as connection, connection:
            connection.cursor().execute(f"SET LOCAL tidegate.writer = 'visits'; {statement}")

    declared = clone / "jobs/pipelines/visits.py"
    declared.write_text(VISITS)
    for arguments in (("migrate", "--new", "visits"), ("migrate",)):
        assert _tidegate(clone, empty, *arguments).returncode == 0
    by_hand("INSERT INTO state.visit VALUES (1, 0, 'a', '2026-01-31Z', 1)")
    by_hand('CREATE TABLE state."visit$20260101" AS SELECT * FROM state.visit')
    declared.write_text(VISITS.replace('"bigint"})},', '"bigint"}, range_partitions=Ranges("at", "month"))},'))
    assert _tidegate(clone, empty, "migrate", "--new", "months").returncode == 0
    before = shape(empty)
    refused = _tidegate(clone, empty, "migrate")
    assert refused.returncode == 1
    assert 'A table is in the way while migrating: relation "visit$20260101" already exists.' in refused.stderr
    assert shape(empty) == before
    by_hand('ALTER TABLE state."visit$20260101" RENAME TO kept')
    assert _tidegate(clone, empty, "migrate").returncode == 0


HOURS = '''"""Views per hour."""

from tidegate.jobs import Count, Files, Pipeline, State, Tumbling

PIPELINE = Pipeline(
    name="hours",
    source=Files("views", glob="*.csv", format="csv", schema={"page": "string", "at": "timestamp"}),
    states={"hours": State(key={"page": "text"}, aggregates={"views": Count()}, window=Tumbling("at", "1 hour", @MORE@))},
)
'''


def test_windows_may_be_kept_for_a_time_that_is_declared_later(empty: Settings, clone: Path) -> None:
    """The migration makes the index by which windows are found, and lets commits delete."""

    def declare(more: str, *commands: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        (clone / "jobs/pipelines/hours.py").write_text(HOURS.replace("@MORE@", more))
        done = [_tidegate(clone, empty, *arguments) for arguments in commands]
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
    again = _tidegate(clone, empty, *new)
    assert "No migration is missing" in again.stdout + again.stderr


A_ROW = """
    SET tidegate.writer = 'hours';
    INSERT INTO state.hours (page, window_start, window_end, last_event, corrections, views, txid)
        VALUES ('a', now(), now(), now(), 0, 1, 1);
"""
ENABLED = """
    SELECT tgname::text, tgenabled::text FROM pg_trigger WHERE tgrelid = 'state.hours'::regclass AND NOT tgisinternal
    UNION ALL SELECT pg_get_statisticsobjdef(oid), '' FROM pg_statistic_ext WHERE stxrelid = 'state.hours'::regclass
    UNION ALL SELECT pg_get_indexdef(indexrelid), '' FROM pg_index
        WHERE indrelid = 'state.hours'::regclass AND indexrelid = 'state.by_views'::regclass
    UNION ALL SELECT 'replica identity', relreplident::text FROM pg_class WHERE oid = 'state.hours'::regclass
    UNION ALL SELECT attname, attstattarget::text FROM pg_attribute
        WHERE attrelid = 'state.hours'::regclass AND attstattarget > 0
"""
BY_HAND = """
    GRANT SELECT (views), UPDATE (views) ON state.hours TO tidegate_stager;
    REVOKE SELECT ON state.hours FROM tidegate_reader;
    GRANT REFERENCES ON state.hours TO PUBLIC;
    CREATE TRIGGER noted BEFORE UPDATE OF views ON state.hours
        FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger();
    CREATE TRIGGER unused BEFORE UPDATE ON state.hours FOR EACH STATEMENT EXECUTE FUNCTION tidegate.single_writer();
    ALTER TABLE state.hours DISABLE TRIGGER unused;
    CREATE TABLE public.pages (page text COLLATE "C" PRIMARY KEY);
    INSERT INTO public.pages VALUES ('a');
    ALTER TABLE state.hours ADD CONSTRAINT a_page FOREIGN KEY (page) REFERENCES public.pages;
    ALTER TABLE state.hours ADD CONSTRAINT few CHECK (views < 1000 AND page <> '%:x');
    ALTER TABLE state.hours ADD CONSTRAINT once UNIQUE (page, window_start, views);
    CREATE INDEX by_views ON state.hours (views) WHERE page <> 'on only';
    CREATE STATISTICS state.together (dependencies) ON views, corrections FROM state.hours;
    ALTER TABLE state.hours ALTER views SET STATISTICS 50;
    COMMENT ON TABLE state.hours IS 'What was viewed, ours''s';
    COMMENT ON COLUMN state.hours.views IS 'how often';
    ALTER TABLE state.hours REPLICA IDENTITY FULL;
"""


@pytest.mark.parametrize("more", ["final_after='1 hour', keep='9 days'", "final_after='1 hour', emit_final=True"])
def test_a_table_that_is_divided_keeps_what_it_had(empty: Settings, clone: Path, more: str) -> None:
    """Its index, exactly its privileges, its triggers, and what an administrator gave it; up and down."""

    def migrate(partitions: str, *commands: tuple[str, ...]) -> None:
        declared = HOURS.replace("@MORE@", more).replace("aggregates=", f"{partitions}aggregates=")
        (clone / "jobs/pipelines/hours.py").write_text(declared)
        for arguments in commands:
            done = _tidegate(clone, empty, *arguments)
            assert done.returncode == 0, done.stderr

    def by_hand(statement: str) -> list[tuple]:
        settings = empty.conninfo(user=empty.pg_owner)
        with closing(psycopg2.connect(**settings)) as connection, connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def found() -> dict[str, list[str]]:
        """Return all but what says that the table is divided."""
        lines = {what: [line for line in of if "$" not in line] for what, of in shape(empty).items()}
        lines["constraints"] = [re.sub(r"_not_null\d+", "_not_null", line) for line in lines["constraints"]]
        lines["relations"] = [re.sub(r"^(state\.\w+) \w(\{fillfactor[^}]*\})?", r"\1 ", line) for line in lines["relations"]]
        given = [(what.replace(" ON ONLY ", " ON "), how) for what, how in by_hand(ENABLED)]
        return lines | {"enabled": sorted(given)}

    migrate("", ("migrate", "--new", "hours"), ("migrate",))
    by_hand(BY_HAND)
    by_hand(A_ROW)
    before, rows = found(), by_hand("SELECT * FROM state.hours")
    assert any(line.startswith("state.ix_hours_window_end") for line in before["relations"])

    migrate("hash_partitions=3, ", ("migrate", "--new", "divided"))
    migrate("hash_partitions=3, ", ("migrate", "--new", "nothing is missing"))  # runs migrations, and registers nothing
    assert found() == before
    assert by_hand("SELECT * FROM state.hours") == rows
    assert len(by_hand("SELECT inhrelid FROM pg_inherits WHERE inhparent = 'state.hours'::regclass")) == 3
    parts = [line for line in shape(empty)["relations"] if line.startswith('state."hours$') and "fillfactor" in line]
    assert not any("tidegate_reader" in line for line in parts), "a partition is not readable where the table is not"
    migrate("hash_partitions=3, ", ("migrate",))
    assert found() == before

    newest = f"{len(FILES) + 1:04d}"
    imports = "from tidegate import migrations; from tidegate.state_store import Settings"
    walk = f"{imports}; migrations.walk(Settings.load(), [], '{newest}')"
    assert _python(clone, empty, walk).returncode == 0
    assert found() == before
    assert by_hand("SELECT * FROM state.hours") == rows


# What a team has given to a table, and how it is taken back.
IN_THE_WAY = {
    "publication": ("CREATE PUBLICATION subscribed FOR TABLE state.page_views", "DROP PUBLICATION subscribed"),
    "rule": (
        "CREATE RULE noted AS ON INSERT TO state.page_views DO ALSO NOTIFY pages",
        "DROP RULE noted ON state.page_views",
    ),
    "constraint": (
        "ALTER TABLE state.page_views ADD CONSTRAINT once UNIQUE (views)",
        "ALTER TABLE state.page_views DROP CONSTRAINT once",
    ),
}
SAID = {
    "publication": "state.page_views is in a publication",
    "rule": "state.page_views has a rule",
    "constraint": "state.page_views cannot have any more .*(ALTER TABLE state.page_views ADD CONSTRAINT once UNIQUE (views))",
}


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_what_a_table_that_is_made_again_would_lack_stops_the_migration(empty: Settings, clone: Path, what: str) -> None:
    """It is named, and nothing is changed; without it, the same migration goes on."""

    def by_hand(statement: str) -> list[tuple]:
        connection = psycopg2.connect(**empty.conninfo(user=empty.pg_owner))
        with closing(connection), connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    declared = clone / "jobs/pipelines/page_views.py"
    declared.write_text(PAGE_VIEWS)
    for arguments in (("migrate", "--new", "pages"), ("migrate",)):
        done = _tidegate(clone, empty, *arguments)
        assert done.returncode == 0, done.stderr
    made, gone = IN_THE_WAY[what]
    by_hand(made)
    declared.write_text(PAGE_VIEWS.replace("key={", "hash_partitions=3, key={"))
    assert _tidegate(clone, empty, "migrate", "--new", "divided").returncode == 0
    refused = _tidegate(clone, empty, "migrate")
    assert refused.returncode == 1
    before, _, after = SAID[what].partition(".*")
    assert before in refused.stderr, refused.stderr
    assert after in refused.stderr, refused.stderr
    assert by_hand("SELECT relkind::text FROM pg_class WHERE oid = 'state.page_views'::regclass") == [("r",)]
    by_hand(gone)
    done = _tidegate(clone, empty, "migrate")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("force", [True, False], ids=["forced", "not for the owner"])
def test_a_table_with_row_level_security_is_not_made_again(empty: Settings, clone: Path, force: bool) -> None:
    """The copy would lack the rows that are hidden from the owner, or show everybody those that are hidden from readers."""

    def by_hand(*statements: str) -> None:
        connection = psycopg2.connect(**empty.conninfo(user=empty.pg_owner))
        with closing(connection), connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def rows() -> list[tuple]:
        with closing(psycopg2.connect(**empty.conninfo(user=empty.pg_reader))) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT page, views FROM state.page_views ORDER BY 1")
            return cursor.fetchall()

    declared = clone / "jobs/pipelines/page_views.py"
    declared.write_text(PAGE_VIEWS)
    for arguments in (("migrate", "--new", "pages"), ("migrate",)):
        done = _tidegate(clone, empty, *arguments)
        assert done.returncode == 0, done.stderr
    by_hand(
        ROWS,
        "ALTER TABLE state.page_views ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY of_readers ON state.page_views FOR SELECT TO tidegate_reader USING (views <= 10)",
        *(["ALTER TABLE state.page_views FORCE ROW LEVEL SECURITY"] if force else []),
    )
    before = rows()
    assert len(before) == 10

    declared.write_text(PAGE_VIEWS.replace("key={", "hash_partitions=3, key={"))
    assert _tidegate(clone, empty, "migrate", "--new", "divided").returncode == 0
    refused = _tidegate(clone, empty, "migrate")
    assert refused.returncode != 0
    assert "row-level security" in refused.stderr
    assert rows() == before

    by_hand(
        "DROP POLICY of_readers ON state.page_views",
        "ALTER TABLE state.page_views DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY",
    )
    done = _tidegate(clone, empty, "migrate")
    assert done.returncode == 0, done.stderr
    assert len(rows()) == 1000


@pytest.mark.parametrize("of_states_only", [True, False], ids=["of states only", "of the ledger"])
def test_code_from_before_a_migration_goes_on_only_if_the_ledger_is_unchanged(
    empty: Settings, clone: Path, *, of_states_only: bool
) -> None:
    """The files say nothing about loaded code: code for the old ledger is refused, a new state disturbs no process."""
    assert _tidegate(clone, empty, "migrate").returncode == 0
    program = (
        "from tidegate.state_store import Settings, StateStore; print(flush=True); input(); StateStore.connect(Settings.load())"
    )
    started = subprocess.Popen(
        **_command(clone, empty, program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    started.stdout.readline()  # it has imported its code
    head = FILES[-1][:4]
    number = f"{int(head) + 1:04d}"
    mark = schema_revision.OF_STATES_ONLY if of_states_only else ""
    new = f"{mark}\nrevision = '{number}'\ndown_revision = '{head}'\ndef upgrade():\n    pass\ndef downgrade():\n    pass\n"
    (clone / f"migrations/versions/{number}_new.py").write_text(new)
    migrated = _tidegate(clone, empty, "migrate")
    assert migrated.returncode == 0, migrated.stderr

    _, message = started.communicate("\n", timeout=60)

    assert (started.returncode == 0) is of_states_only, message
    if not of_states_only:
        known = schema_revision.KNOWN_LEDGER
        assert f"was migrated to revision {number}, but this process was started with code for {known}" in message
        assert "Restart the stack: tidegate down && tidegate up" in message


def _tidegate(clone: Path, settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _python(clone, settings, MAIN, *arguments)


def _python(clone: Path, settings: Settings, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the clone's code on the test's database."""
    return subprocess.run(**_command(clone, settings, code, *arguments), capture_output=True, timeout=400, check=False)


def _command(clone: Path, settings: Settings, code: str, *arguments: str) -> dict[str, Any]:
    where = settings.conninfo()
    environment = {
        **os.environ,
        "PYTHONPATH": str(clone),
        "TIDEGATE_HOME": str(settings.home),
        "PGHOST": where["host"],
        "PGPORT": str(where["port"]),
        "PGDATABASE": where["dbname"],
        "PGPASSFILE": where["passfile"],
    }
    return {"args": [sys.executable, "-c", code, *arguments], "cwd": clone, "env": environment, "text": True}


def _digest(folder: Path) -> dict[str, str]:
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.rglob("*.py"))}
