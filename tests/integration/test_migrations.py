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

import psycopg2
import pytest

from tests.integration.conftest import Execute, run_verb, until
from tests.servers import Server
from tests.store import ColumnType, ValueColumn, project, schema_revision
from tidegate import migrations
from tidegate.jobs import Count, Files, Max, Min, Pipeline, State, Sum
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import SchemaOutOfDate, StoreUnavailable

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


# refusals


@pytest.mark.promise("decision:0020")
def test_a_pipeline_without_a_migration_does_not_stop_the_others(empty: Settings, home: Path) -> None:
    daily, counts = SPECS
    extra = replace(daily, name="extra", states=(replace(daily.states[0], name="extra_state"),))
    wider = replace(counts.states[0], values=(*counts.states[0].values, ValueColumn("more", ColumnType("bigint"), "sum")))
    changed = replace(counts, states=(wider,))
    rival = replace(daily, name="rival")

    broken = migrations.upgrade_all_but_broken(empty, [daily, extra, changed, rival])

    assert broken["extra"].startswith("Pipeline extra is not registered: the migrations do not make its state extra_state as")
    assert broken[counts.name].startswith(
        f"Pipeline {counts.name} is not registered: the migrations do not make its state {wider.name} as it is declared."
    )
    assert "belongs to pipeline sales: a state has one writer" in broken["rival"]
    assert set(broken) == {"extra", counts.name, "rival"}
    with StateStore.connect(empty) as store:
        assert [lag.pipeline for lag in store.lag()] == [daily.name]
    with pytest.raises(SchemaOutOfDate, match=r"belongs to pipeline sales: a state has one writer. Rename one of them"):
        migrations.new_revision(empty, [daily, rival], "two pipelines with a state of one name")


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

from tidegate.jobs import Count, Files, Pipeline, Rows, State

PIPELINE = Pipeline(
    name="visits",
    source=Files("data/visits", schema={"page": "string", "at": "timestamp", "number": "bigint"}),
    states={"visit": Rows({"page": "text", "at": "timestamptz", "number": "bigint"})},
)
'''


KEY = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 'state.visit'::regclass AND contype = 'p'"


def test_a_key_that_is_declared_otherwise_becomes_the_tables_key(author: Author) -> None:
    for key, found in {'"page": "text"': "page", '"page": "text", "number": "bigint"': "page, number"}.items():
        author.migrates(re.sub(r"Rows\(.*\)", f'State({{{key}}}, {{"visits": Count()}})', VISITS))
        assert author.by_hand(KEY) == [(f"PRIMARY KEY ({found})",)]


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
    own = author.folder / "migrations/0001_visits.py"
    for role in ("tidegate", "tidegate_reader"):
        StateStore.connect(settled, user=role).close()
    for name, said in {
        "0002_more": r"at revision 0001 of the project's migrations, which are at 0002. Run",
        "0001_of_another_branch": "0001_of_another_branch.py and 0001_visits.py in .* have the same number",
    }.items():
        other = own.with_name(f"{name}.py")
        shutil.copy(own, other)
        with pytest.raises(SchemaOutOfDate, match=said):
            StateStore.connect(settled) if name == "0002_more" else migrations.upgrade(settled, [])
        other.unlink()
    other = own.rename(own.with_name("0001_of_another_project.py"))
    with pytest.raises(SchemaOutOfDate, match=r"has had migration 0001_visits.py .* 0001_of_another_project.py in its place"):
        StateStore.connect(settled)
    other.unlink()
    with pytest.raises(SchemaOutOfDate, match=r"newer than those in.*Update the project."):
        StateStore.connect(settled)
