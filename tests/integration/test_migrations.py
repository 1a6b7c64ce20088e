"""The ledger is made as a whole; migrations lead to the declared states, in one line, with clear refusals."""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa

from tests.integration.conftest import Execute, run_verb, until
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
    with migrations.connected(settings) as connection:
        return schema_revision.current_revision(connection)


# up


def test_migrations_lead_to_the_declared_tables(empty: Settings, home: Path) -> None:
    assert migrations.upgrade(empty, []) == ("0001", [])
    assert migrations.new_revision(empty, SPECS, "nothing") is None
    assert [file.name for file in (home / "migrations").glob("*.py")] == ["0001_states.py"]
    migrated = shape(empty)
    with migrations.connected(empty) as connection:
        state_tables.metadata_of(tuple(SPECS)).drop_all(connection)
        state_tables.metadata_of(tuple(SPECS)).create_all(connection)
    assert shape(empty) == migrated

    assert migrations.upgrade(empty, SPECS) == ("0001", [spec.name for spec in SPECS])
    assert migrations.upgrade(empty, SPECS) == ("0001", [])


def test_without_a_project_no_migration_is_written(empty: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """States have migrations in a project only; the ledger has none."""
    with pytest.raises(AccessRefused, match=r"run by role tidegate_owner.*pg_owner names tidegate"):
        migrations.upgrade(replace(empty, pg_owner="tidegate"), [])
    monkeypatch.setenv(project.HOME_VARIABLE, str(tmp_path))
    with pytest.raises(UsageError, match=r"has no folder pipelines.*tidegate init"):
        migrations.new_revision(empty, SPECS, "states")
    assert shape(empty)["relations"] == []


# refusals


DAILY = SPECS[0].states[0]
CHANGED = {
    "key added": {"keys": (*DAILY.keys, KeyColumn("more", ColumnType("text")))},
    "value added": {"values": (*DAILY.values, ValueColumn("more", ColumnType("bigint"), "sum"))},
    "value type": {"values": tuple(replace(value, type=ColumnType("numeric(38,2)")) for value in DAILY.values)},
    "keys nullable": {"keys": tuple(replace(key, nullable=True) for key in DAILY.keys)},
}


def test_a_state_that_its_migrations_do_not_make_is_refused_and_nothing_is_done(empty: Settings, home: Path) -> None:
    extra = replace(SPECS[0], name="extra", states=(replace(DAILY, name="extra_state"),))
    with pytest.raises(SchemaOutOfDate) as refused:
        migrations.upgrade(empty, [*SPECS, extra])
    assert str(refused.value) == (
        "Pipeline extra is not registered: no migration creates its state extra_state. Write the missing migration: "
        "tidegate migrate --new 'what changed', then run: tidegate migrate"
    )
    for change in CHANGED.values():
        with pytest.raises(SchemaOutOfDate, match="tidegate migrate --new"):
            migrations.upgrade(empty, [replace(SPECS[0], states=(replace(DAILY, **change),)), SPECS[1]])
    assert shape(empty)["relations"] == []


def test_a_ledger_of_other_code_is_left_alone(settings: Settings, as_role: Execute) -> None:
    before = shape(settings)
    steps: list[Callable[[], object]] = [
        lambda: migrations.upgrade(settings, SPECS),
        lambda: migrations.upgrade_all_but_broken(settings, SPECS),
        lambda: migrations.column_changes(settings, SPECS),
        lambda: migrations.new_revision(settings, SPECS, "states"),
        lambda: migrations.accept_epoch(settings, "an operator"),
    ]
    for found, message in {
        "0032": r"made by an earlier, unreleased revision of Tidegate \(0032\): make a new database and read the sources",
        "0123456789ab": r"made by another revision.*\(schema.sql 0123456789ab\).*use the code that made it; or make a new",
    }.items():
        as_role("tidegate_owner", "UPDATE tidegate.alembic_version SET version_num = %s", [found])
        for step in steps:
            with pytest.raises(SchemaOutOfDate, match=message):
                step()
    assert shape(settings) == before


@pytest.mark.promise("decision:0020")
def test_a_pipeline_without_a_migration_does_not_stop_the_others(empty: Settings, home: Path) -> None:
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
    daily, counts = SPECS
    upgrade(empty, SPECS)
    without = replace(counts, states=(replace(counts.states[0], name="noted", updates=True),))
    moved = [replace(daily, states=(*daily.states, *counts.states)), without]
    assert upgrade(empty, moved) in ({}, ("0001", [counts.name, daily.name]))
    with migrations.connected(empty) as connection:
        assert set(connection.scalars(sa.select(tables.state_table.c.pipeline))) == {daily.name}


MORE = """
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    op.execute("ALTER TABLE state.daily ADD noted text")
"""


@pytest.mark.promise("limit:DDL_LOCK_TIMEOUT_SECONDS", "decision:0020")
def test_a_table_in_use_delays_a_migration_by_seconds_only(
    settings: Settings, home: Path, monkeypatch: pytest.MonkeyPatch, waiting: Callable[[], int], as_role: Execute
) -> None:
    """A waiting ALTER would delay every later merge: it gives up, changes nothing, and may be tried again."""
    with ThreadPoolExecutor(1) as pool:
        with migrations.connected(settings) as connection:
            assert migrations._upgrade(connection, [], may_wait=False).refused == {}
            second = pool.submit(migrations.upgrade, settings, [])
            until(waiting)
        assert second.result(30) == ("0001", [])
    assert revision(settings) == "0001"

    as_role("postgres", f"ALTER ROLE tidegate_owner IN DATABASE {settings.pg_database} SET search_path = tidegate, state")
    again = replace(settings, lock_timeout_seconds=58)  # with connections of its own
    assert migrations.upgrade(again, [])[0] == "0001"
    assert migrations.upgrade(again, SPECS)[1] == sorted(spec.name for spec in SPECS)
    assert migrations.upgrade(again, SPECS) == ("0001", [])

    (home / "migrations" / "0002_more.py").write_text(MORE)
    monkeypatch.setattr(migrations, "DDL_LOCK_TIMEOUT_SECONDS", 0.2)
    with closing(psycopg2.connect(**settings.conninfo())) as reader, reader.cursor() as cursor:
        cursor.execute("SELECT FROM state.daily")
        with pytest.raises(StoreUnavailable, match="migrating: a lock timeout"):
            migrations.upgrade(settings, SPECS)
    assert revision(settings) == "0001"


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


class Author:
    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        for part in ("pipelines", "migrations"):
            (folder / part).mkdir(parents=True)

    def declare(self, declared: str) -> None:
        name = re.search('name="(.*)"', declared)
        assert name is not None
        (self.folder / "pipelines" / f"{name[1]}.py").write_text(declared)

    def tries(self, *arguments: str) -> str:
        done = run_verb(self.settings, self.folder, *arguments)
        assert done.returncode == 1
        return done.stderr

    def runs(self, *arguments: str) -> str:
        done = run_verb(self.settings, self.folder, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def migrates(self, declared: str) -> None:
        """Declare, write the migration and run it; then none is missing."""
        self.declare(declared)
        self.runs("migrate", "--new", "visits")
        self.runs("migrate")
        assert "No migration is missing" in self.runs("migrate", "--new", "again")

    def by_hand(self, statement: str) -> list[tuple]:
        connection = psycopg2.connect(**self.settings.conninfo(user=self.settings.pg_owner))
        with closing(connection), connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []


@pytest.fixture
def author(empty: Settings, tmp_path: Path) -> Author:
    return Author(empty, tmp_path / "100% my shop")


@pytest.mark.promise("verb:migrate")
def test_an_author_gets_a_migration_that_works(empty: Settings, author: Author) -> None:
    tree = _digest(REPOSITORY / "migrations")
    author.declare(PAGE_VIEWS)
    assert re.search("page_views.*tidegate migrate --new", author.tries("migrate"))
    wrote = author.runs("migrate", "--new", "Page views: 'two' states!")
    (file,) = (file.name for file in (author.folder / "migrations").glob("*.py"))
    assert file == "0001_page_views_two_states.py"
    assert file in wrote
    assert "# ###" not in (author.folder / "migrations" / file).read_text(), "what Alembic says of a draft"
    assert "No migration is missing" in author.runs("migrate", "--new", "again")
    author.runs("migrate")
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

    author.runs("migrate")
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


KEYS = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 'state.visit'::regclass AND contype IN ('p', 'u')"


def test_a_key_that_is_declared_otherwise_becomes_the_tables_key(author: Author) -> None:
    for key, others, constraint in (
        ('"page": "text"', "", "PRIMARY KEY (page)"),
        ('"page": "text", "number": "bigint"', "", "PRIMARY KEY (page, number)"),
        ('"page": "text", "number": "bigint"', ", null_keys=True", "UNIQUE NULLS NOT DISTINCT (page, number)"),
        ('"number": "bigint"', "", "PRIMARY KEY (number)"),
    ):
        state = f'State({{{key}}}, {{"visits": Count()}}{others})'
        author.migrates(re.sub(r"Rows\(.*\)", state, VISITS).replace("Ranges, Rows", "Count, State"))
        assert author.by_hand(KEYS) == [(constraint,)]


def divided(by: str) -> str:
    return VISITS.replace('"bigint"})},', f'"bigint"}}, range_partitions=Ranges({by}))}},')


ROWS = "SELECT * FROM state.visit ORDER BY 1, 2"
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
    UNION ALL SELECT attname, attstorage::text || attcompression::text FROM pg_attribute
        WHERE attrelid = 'state.visit'::regclass AND attname = 'page'
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
    ALTER TABLE state.visit ALTER page SET STORAGE MAIN, ALTER page SET COMPRESSION pglz;
"""
BY_MONTH = divided('"at", "month"')


@pytest.mark.soak
def test_a_table_that_is_divided_keeps_what_it_had(empty: Settings, author: Author) -> None:
    def found() -> dict[str, list[str]]:
        """Return all but what says that the table is divided, and by which migration."""
        lines = {
            what: [line for line in of if "$" not in line and "alembic_version" not in line]
            for what, of in shape(empty).items()
        }
        lines["constraints"] = [re.sub(r"_not_null\d+", "_not_null", line) for line in lines["constraints"]]
        lines["constraints"] = [line for line in lines["constraints"] if not re.search("pk_visit|visit_(at|number)_not", line)]
        # What divides a table is part of its key.
        dividing = tuple(f"state.{table}.{column} " for table in ("visit", "pk_visit") for column in ("at", "number"))
        lines["columns"] = [line for line in lines["columns"] if not line.startswith(dividing)]
        lines["relations"] = [re.sub(r"^(state\.\w+) \w", r"\1 ", line) for line in lines["relations"]]
        given = [(what.replace(" ON ONLY ", " ON "), how) for what, how in author.by_hand(ENABLED)]
        return lines | {"enabled": sorted(given)}

    author.migrates(VISITS)
    author.by_hand(BY_HAND)
    author.by_hand(A_ROW)
    before, rows = found(), author.by_hand(ROWS)

    for declared, parts in ((BY_MONTH, 1), (BY_MONTH.replace("month", "day"), 1), (divided('"number", 10'), 1), (VISITS, 0)):
        author.declare(declared)
        assert "No migration is missing" in author.runs("migrate", "--new", "divided")
        author.runs("migrate")
        assert found() == before
        assert author.by_hand(ROWS) == rows
        partitions = [line for line in shape(empty)["relations"] if re.match(r'state\."visit\$\w+" r', line)]
        assert len(partitions) == parts
        assert not any("tidegate_reader" in line for line in partitions), "readers would pass the table's privileges by"


SECURED = """
    ALTER TABLE state.visit ENABLE ROW LEVEL SECURITY;
    CREATE POLICY of_readers ON state.visit FOR SELECT TO tidegate_reader USING (number <= 10);
"""
IN_THE_OPEN = """
    DROP POLICY of_readers ON state.visit;
    ALTER TABLE state.visit DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY;
"""
# What a team has given to a table, what a migration says of it, and how it is taken back.
IN_THE_WAY = {
    "publication": (
        "CREATE PUBLICATION subscribed FOR TABLE state.visit",
        ("state.visit, which is in publication subscribed",),
        "DROP PUBLICATION subscribed",
    ),
    "rule": (
        "CREATE RULE noted AS ON INSERT TO state.visit DO ALSO NOTIFY pages",
        ("state.visit, which has a rule",),
        "DROP RULE noted ON state.visit",
    ),
    "constraint": (
        "ALTER TABLE state.visit ADD CONSTRAINT once UNIQUE (number)",
        (
            "state.visit, to which your team has given what another cannot have",
            "(ALTER TABLE state.visit ADD CONSTRAINT once UNIQUE (number))",
        ),
        "ALTER TABLE state.visit DROP CONSTRAINT once",
    ),
    "rows that readers do not see": (SECURED, ("row-level security",), IN_THE_OPEN),
    "rows that the owner does not see": (
        f"{SECURED} ALTER TABLE state.visit FORCE ROW LEVEL SECURITY",
        ("row-level security",),
        IN_THE_OPEN,
    ),
    "a partition that was detached": (
        'CREATE TABLE state."visit$20260101" AS SELECT * FROM state.visit',
        ('A table is in the way while migrating: relation "visit$20260101" already exists.',),
        'ALTER TABLE state."visit$20260101" RENAME TO kept',
    ),
}


def test_what_a_table_that_is_made_again_would_lack_stops_the_migration(empty: Settings, author: Author) -> None:
    author.migrates(VISITS)
    author.by_hand(A_ROW)
    author.declare(BY_MONTH)
    for made, said, gone in IN_THE_WAY.values():
        author.by_hand(made)
        before = shape(empty)
        refused = author.tries("migrate")
        assert [words for words in said if words not in refused] == [], refused
        assert shape(empty) == before
        author.by_hand(gone)
    author.runs("migrate")
    assert len(author.by_hand(ROWS)) == 1


def _digest(folder: Path) -> dict[str, str]:
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.rglob("*.py"))}


# a project's line of migrations

WIDER = VISITS.replace('"number": "bigint"}', '"number": "bigint", "more": "bigint"}')


@pytest.fixture
def settled(author: Author, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a project, which functions of this process use too, with one migration that was run."""
    monkeypatch.setenv(project.HOME_VARIABLE, str(author.folder))
    author.migrates(VISITS)
    return replace(author.settings, home=author.folder)


@pytest.mark.promise("decision:0045")
def test_a_project_has_a_line_of_its_own(settled: Settings, author: Author, monkeypatch: pytest.MonkeyPatch) -> None:
    author.migrates(WIDER)
    assert sorted(file.name for file in (author.folder / "migrations").glob("*.py")) == ["0001_visits.py", "0002_visits.py"]
    assert author.by_hand("SELECT more FROM state.visit") == []

    (author.folder / "pipelines").rename(author.folder / "elsewhere")  # it is not mounted, or not in this branch
    said = r"at revision 0002 of a project's migrations, and .*100% my shop has no folder pipelines\. Go into that project's"
    for step in (migrations.upgrade, migrations.upgrade_all_but_broken, partial(migrations.new_revision, message="flights")):
        with pytest.raises(SchemaOutOfDate, match=said):
            step(settled, SPECS)
    assert author.by_hand("SELECT pipeline FROM tidegate.pipeline") == [("visits",)]
    monkeypatch.delenv(project.HOME_VARIABLE)
    StateStore.connect(settled).close()  # programs that read states need no project


def test_every_process_needs_the_projects_revision(settled: Settings, author: Author) -> None:
    own, other, more = (
        author.folder / f"migrations/{name}.py" for name in ("0001_visits", "0001_of_another_branch", "0002_more")
    )
    for role in ("tidegate", "tidegate_reader"):
        with StateStore.connect(settled, user=role) as store, store.engine.connect() as connection:
            assert connection.scalar(sa.text("SELECT version_num FROM tidegate.alembic_version_of_project")) == "0001"

    more.write_text(own.read_text())
    with pytest.raises(SchemaOutOfDate, match=r"at revision 0001 of the project's migrations, which are at 0002. Run"):
        StateStore.connect(settled)
    more.unlink()

    other.write_text(own.read_text())
    for verb in (["migrate"], ["migrate", "--new", "x"]):
        assert "Migrations 0001_of_another_branch.py and 0001_visits.py in" in (said := author.tries(*verb)), said
        assert "Traceback" not in said
    kept = own.read_text()
    own.unlink()
    for verb in (["migrate"], ["migrate", "--new", "x"], ["run", "visits"]):
        said = author.tries(*verb)
        assert "has had migration 0001_visits.py of a project, and" in said
        assert "has 0001_of_another_branch.py in its place" in said
    other.unlink()

    for verb in (["inspect", "visits"], ["migrate"], ["migrate", "--new", "x"]):
        assert re.search("newer than those in.*Update the project.", author.tries(*verb))
    own.write_text(kept)
    author.by_hand("UPDATE tidegate.alembic_version_of_project SET version_num = '0007'")
    assert re.search("newer than those in.*Update the project.", author.tries("migrate"))
    author.by_hand("UPDATE tidegate.alembic_version_of_project SET version_num = '0001'")
    author.migrates(WIDER)
