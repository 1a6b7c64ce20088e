"""The ledger is made as a whole; migrations lead to the declared states, in one line, with clear refusals."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from tests import in_process
from tests.checkout import REPOSITORY
from tests.integration.conftest import TALLY, holding, until
from tests.servers import Server
from tests.statements import execute
from tests.store import ColumnType, ValueColumn, errors, project, schema_revision
from tidegate import migrations
from tidegate.jobs.pipelines import word_count
from tidegate.state_store import Settings, StateStore

SPECS = [TALLY.spec, word_count.PIPELINE.spec]


@pytest.fixture
def empty(server: Server, tmp_path: Path) -> Iterator[Settings]:
    with server.database() as name:
        yield replace(server.settings, pg_database=name, home=tmp_path)


@pytest.fixture
def home(empty: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pipelines").mkdir()
    monkeypatch.setenv(project.HOME_VARIABLE, str(tmp_path))
    migrations.new_revision(empty, SPECS, "states")
    return tmp_path


def revision(settings: Settings) -> str | None:
    with migrations.connected(settings) as connection:
        return schema_revision.current_revision(connection)


@pytest.mark.promise("decision:0020")
@pytest.mark.usefixtures("home")
def test_a_pipeline_without_a_migration_does_not_stop_the_others(empty: Settings) -> None:
    tally, words = SPECS
    extra = replace(tally, name="extra", states=(replace(tally.states[0], name="extra_state"),))
    wider = replace(words.states[0], values=(*words.states[0].values, ValueColumn("more", ColumnType("bigint"), "sum")))
    rival = replace(tally, name="rival")
    broken = migrations.upgrade_all_but_broken(empty, [tally, extra, replace(words, states=(wider,)), rival])

    says = "Pipeline {} is not registered: the migrations do not make its state {} as it is declared."
    assert broken.keys() == {"extra", "word_count", "rival"}
    assert broken["extra"].startswith(says.format("extra", "extra_state"))
    assert broken["word_count"].startswith(says.format("word_count", "word_count"))
    assert "belongs to pipeline tally: a state has one writer" in broken["rival"]
    with StateStore.connect(empty) as store:
        assert [lag.pipeline for lag in store.lag()] == ["tally"]
    with pytest.raises(errors.SchemaOutOfDate, match=r"belongs to pipeline tally: a state has one writer. Rename one of them"):
        migrations.new_revision(empty, [tally, rival], "two pipelines with a state of one name")


MORE = """
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    op.execute("ALTER TABLE state.per_shop ADD noted text")
"""


@pytest.mark.promise("limit:DDL_LOCK_TIMEOUT_SECONDS", "decision:0020")
def test_a_table_in_use_delays_a_migration_by_seconds_only(
    settings: Settings, home: Path, monkeypatch: pytest.MonkeyPatch, waiting: Callable[[], int]
) -> None:
    """A waiting ALTER would delay every later merge: it gives up, changes nothing, and may be tried again."""
    with ThreadPoolExecutor(1) as pool:
        with migrations.connected(settings) as connection:
            assert migrations._upgrade(connection, [], may_wait=False).refused == {}
            second = pool.submit(migrations.upgrade, settings, [])
            until(waiting)
        assert second.result(30) == ("0001", [])
    assert revision(settings) == "0001"

    alter = f"ALTER ROLE tidegate_owner IN DATABASE {settings.pg_database} SET search_path = tidegate, state"
    execute(settings.conninfo(user="postgres"), alter)
    again = replace(settings, lock_timeout_seconds=58)  # with connections of its own
    for specs, registered in (([], []), (SPECS, ["tally", "word_count"]), (SPECS, [])):
        assert migrations.upgrade(again, specs) == ("0001", registered)

    (home / "migrations" / "0002_more.py").write_text(MORE)
    monkeypatch.setattr(migrations, "DDL_LOCK_TIMEOUT_SECONDS", 0.2)
    timeout = pytest.raises(errors.StoreUnavailable, match="migrating: a lock timeout")
    with holding(settings, "SELECT FROM state.per_shop"), timeout:
        migrations.upgrade(settings, SPECS)
    assert revision(settings) == "0001"


PAGE_VIEWS = '''"""Page views."""

from tidegate.jobs import Count, Files, History, Max, Pipeline, Session, State, Sum

PIPELINE = Pipeline(
    name="page_views",
    source=Files("views", glob="*.csv", format="csv", schema={"page": "string"}),
    states={
        "page_views": State({"page": "text"}, {"amount": Sum("amount", "numeric(20,4)"), "code": Max("code", "bytea")}),
        "page_visitors": State(key={"visitor": "text", "id": "uuid"}, aggregates={"visits": Count()}, null_keys=True),
        "sessions": State(window=Session("at", "30 minutes", final_after="1 day", emit_final=True)),
        "page_titles": History(key={"page": "text"}, columns={"title": "text"}, order_by={"at": "timestamptz"}),
    },
)
'''
GUARDED = "SELECT tgrelid::regclass::text FROM pg_trigger WHERE tgfoid = 'tidegate.single_writer'::regproc"
KEY = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = '{}'::regclass AND contype IN ('p', 'u')"
GRANTS = "SELECT relname, relacl::text FROM pg_class WHERE relnamespace = 'state'::regnamespace"


@dataclass
class Author:
    settings: Settings
    folder: Path

    def runs(self, *arguments: str, code: int = 0) -> str:
        environment = os.environ | in_process.environment_of(replace(self.settings, home=self.folder))
        done = in_process.run(arguments, environment, self.folder)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def migrates(self, declared: str) -> None:
        (self.folder / "pipelines" / "visits.py").write_text(declared)
        self.runs("migrate", "--new", "visits")
        self.runs("migrate")
        assert "No migration is missing" in self.runs("migrate", "--new", "again")

    def sql(self, statement: str) -> list[tuple]:
        return execute(self.settings.conninfo(user=self.settings.pg_owner), statement)


@pytest.fixture
def author(empty: Settings, tmp_path: Path) -> Author:
    folder = tmp_path / "100% my shop"
    for part in ("pipelines", "migrations"):
        (folder / part).mkdir(parents=True)
    return Author(empty, folder)


@pytest.mark.promise("verb:migrate")
def test_an_author_gets_a_migration_that_works(author: Author) -> None:
    own, ours = author.folder / "migrations", sorted((REPOSITORY / "migrations").rglob("*.py"))
    (author.folder / "pipelines" / "page_views.py").write_text(PAGE_VIEWS)
    assert re.search("page_views.*tidegate migrate --new", author.runs("migrate", code=1))
    wrote = author.runs("migrate", "--new", 'C:\\Views: """two""" states!')
    (file,) = own.glob("*.py")
    assert file.name == "0001_c_views_two_states.py"
    assert file.name in wrote
    assert "# ###" not in file.read_text(), "what Alembic says of a draft"
    assert "No migration is missing" in author.runs("migrate", "--new", "again")
    author.runs("migrate")
    assert revision(author.settings) == "0001"
    assert sorted((REPOSITORY / "migrations").rglob("*.py")) == ours
    states = {"page_views", "page_visitors", "sessions", "sessions_final", "page_titles_versions"}
    assert {name for (name,) in author.sql(GUARDED)} == {f"state.{state}" for state in states}
    assert author.sql(KEY.format("state.page_visitors")) == [("UNIQUE NULLS NOT DISTINCT (visitor, id)",)]
    grants = dict(author.sql(GRANTS))
    assert "tidegate=arwd/" in grants["sessions"], "sessions that become one are taken out"
    assert "tidegate=arw/" in grants["page_views"]
    assert "tidegate_stager=r/" in grants["sessions_final"]
    assert "ix_sessions_window_end" in grants


VISITS = '''"""Visits as they come."""

from tidegate.jobs import Count, Files, Pipeline, Rows, State

PIPELINE = Pipeline(
    name="visits",
    source=Files("data/visits", schema={"page": "string", "at": "timestamp", "number": "bigint"}),
    states={"visit": Rows({"page": "text", "at": "timestamptz", "number": "bigint"})},
)
'''
WIDER = VISITS.replace('"number": "bigint"}', '"number": "bigint", "more": "bigint"}')


def test_a_key_that_is_declared_otherwise_becomes_the_tables_key(author: Author) -> None:
    for key, found in {'"page": "text"': "page", '"page": "text", "number": "bigint"': "page, number"}.items():
        author.migrates(re.sub(r"Rows\(.*\)", f'State({{{key}}}, {{"visits": Count()}})', VISITS))
        assert author.sql(KEY.format("state.visit")) == [(f"PRIMARY KEY ({found})",)]


@pytest.fixture
def settled(author: Author, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv(project.HOME_VARIABLE, str(author.folder))
    author.migrates(VISITS)
    return replace(author.settings, home=author.folder)


@pytest.mark.promise("decision:0045")
def test_a_project_has_a_line_of_its_own(settled: Settings, author: Author, monkeypatch: pytest.MonkeyPatch) -> None:
    author.migrates(WIDER)
    assert sorted(file.name for file in (author.folder / "migrations").glob("*.py")) == ["0001_visits.py", "0002_visits.py"]
    assert author.sql("SELECT more FROM state.visit") == []

    (author.folder / "pipelines").rename(author.folder / "elsewhere")  # it is not mounted, or not in this branch
    says = r"at revision 0002 of a project's migrations, and .*100% my shop has no folder pipelines\. Go into that project's"
    for step in (migrations.upgrade, migrations.upgrade_all_but_broken, partial(migrations.new_revision, message="flights")):
        with pytest.raises(errors.SchemaOutOfDate, match=says):
            step(settled, SPECS)
    assert author.sql("SELECT pipeline FROM tidegate.pipeline") == [("visits",)]
    monkeypatch.delenv(project.HOME_VARIABLE)
    StateStore.connect(settled).close()  # programs that read states need no project


def test_every_process_needs_the_projects_revision(settled: Settings, author: Author) -> None:
    def is_refused(says: str, step: Callable[[Settings], object] = StateStore.connect) -> None:
        with pytest.raises(errors.SchemaOutOfDate, match=says):
            step(settled)

    own = author.folder / "migrations/0001_visits.py"
    for role in ("tidegate", "tidegate_reader"):
        StateStore.connect(settled, user=role).close()
    other = shutil.copy(own, own.with_name("0002_more.py"))
    is_refused(r"at revision 0001 of the project's migrations, which are at 0002. Run")
    other = other.rename(own.with_name("0001_of_another_branch.py"))
    says = "0001_of_another_branch.py and 0001_visits.py in .* have the same number"
    is_refused(says, lambda settings: migrations.upgrade(settings, []))
    own.unlink()
    is_refused(r"has had migration 0001_visits.py .* 0001_of_another_branch.py in its place")
    other.unlink()
    is_refused(r"newer than those in.*Update the project.")
