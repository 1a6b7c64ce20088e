"""Advice of `why` and of error pages is right: tests make a fault, do what is printed, and the pipeline goes on."""

import gzip
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psycopg2
import pytest
import sqlalchemy as sa

from tests import in_process
from tests.cli.advice import Answer, Followed, Project
from tests.cli.conftest import CommandLine
from tests.layers import ADVICE
from tests.servers import Server
from tests.sources.in_process import stage_here
from tests.stack.neighbour import LISTENER, account, impostor
from tests.store import HOME_VARIABLE, Attempt, PipelineSpec, tables
from tidegate import migrations
from tidegate.jobs.engine.processing import Processor
from tidegate.jobs.registry import find_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import CommitOutOfOrder

AsOwner = Callable[[sa.Executable], sa.CursorResult]


@pytest.fixture(scope="module")
def followed() -> Followed:
    return Followed()


@pytest.fixture(scope="module")
def made(server: Server) -> Iterator[list[Project]]:
    """The projects that this module's tests have made, one after the other."""
    made: list[Project] = []
    yield made
    for project in made:
        server.drop_database(project.line.settings.pg_database)


@pytest.fixture
def project(
    server: Server, template: str, tmp_path_factory: pytest.TempPathFactory, followed: Followed, made: list[Project]
) -> Project:
    """A project in which nothing waits: that of the test before, unless that has failed."""
    if not made or not made[-1].has_ended:
        home = tmp_path_factory.mktemp("project")
        settings = replace(server.settings, pg_database=server.create_database(template), home=home)
        made.append(Project.made(settings, followed))
    made[-1].begin()
    return made[-1]


@pytest.fixture(autouse=True)
def _counted_here(monkeypatch: pytest.MonkeyPatch, stack: Settings, request: pytest.FixtureRequest) -> None:
    """Let batches be counted in this process, but those whose errors or expressions are Spark's, or that go to another."""
    in_spark = Processor._stage
    if request.function is test_content_that_fails:
        return

    def stage(processor: Processor, attempt: Attempt) -> None:
        pipeline = processor._pipeline
        is_plain = not (pipeline.transform or pipeline.spec.quarantines)
        is_ours = processor._store.settings.spark_remote == stack.spark_remote
        (stage_here if is_plain and is_ours else in_spark)(processor, attempt)

    monkeypatch.setattr(Processor, "_stage", stage)


@pytest.fixture
def own_project(settings: Settings, followed: Followed) -> Project:
    return Project.made(settings, followed)


def transform(expression: str) -> str:
    return f"transform=lambda rows: rows.{expression},"


LARGE = 2**31 - 1
PAID = "checks={{'paid': Check(lambda batch: (daily := batch.state('daily')).select().where(daily.c.cents < {}))}},"
# Of each error of content: a row that fails, whether it counts in the end; the declaration, and the corrected one.
CONTENT = {
    "MALFORMED_RECORD": ("AA,40000", True, {"schema": '{"carrier": "string", "cents": "smallint"}'}, {}),
    "BAD_KEY": (",5", False, {}, {"more": transform("where('carrier IS NOT NULL')")}),
    "OVERFLOW": (f"DL,{LARGE}", False, {}, {"more": transform(f"where('cents < {LARGE}')")}),
    "TRANSFORM_FAILED": (
        "AA,-1",
        False,
        {"more": transform("selectExpr('carrier', \"IF(cents < 0, raise_error('negative'), cents) AS cents\")")},
        {"more": transform("where('cents >= 0')")},
    ),
    "DECLARATION_INVALID": ("AA,1", True, {"more": transform("select('carrier')")}, {}),
    "CHECK_FAILED": ("B6,-9", True, {"more": PAID.format(0)}, {"more": PAID.format(-(10**6))}),
}


# Steps of a correction that is registered and tried by later ones.
CORRECTED = {"BAD_KEY": "Filter or repair", "DECLARATION_INVALID": "Correct the transform"}


def test_content_that_fails(project: Project) -> None:
    project.write("dl.csv", "DL,9")
    project.type("tidegate run flights")
    for code, (row, counts, wrong, right) in CONTENT.items():

        def fail(code: str = code, row: str = row, counts: bool = counts, wrong: dict[str, str] = wrong) -> int:
            if "schema" in wrong:
                project.declare(**wrong)
                project.type("tidegate migrate")
            else:  # code is not compared
                project.declare(**wrong, version=str(project.version))
            name = f"b{len(project.rows):03d}{code}.csv"
            project.write(name, "UA,1", row)
            project.fails("tidegate run flights", code)
            if not counts:
                project.counts(name, "UA,1")
            return project.newest()

        correct = partial(project.declare, **right)
        txid = fail()
        assert code in project.follow(code, "tidegate why flights", txid=txid)
        if code in CORRECTED:
            project.follow(code, CORRECTED[code], act=correct)
        project.heed(project.why("HALTED"), act=correct, also="tidegate migrate")
        project.follow(code, "tidegate migrate", txid=txid, done=True)
        assert project.state() == project.clean()
    txid = fail()
    assert code == "CHECK_FAILED"
    project.follow(code, "If the check is wrong", txid=txid, act=partial(project.declare, version=str(project.version)))
    project.goes_on()


def test_content_that_is_given_up(project: Project) -> None:
    for code in (*CONTENT, "SOURCE_CHANGED"):
        if code != "DECLARATION_INVALID":
            for ask in ("heed", "follow"):
                txid, file = given_up(project, code)
                if ask == "heed":
                    project.heed(project.why("HALTED"), skips=True)
                elif code != "SOURCE_CHANGED":
                    project.follow(code, "tidegate skip", txid=txid)
                else:
                    project.follow(code, "give the batch up", txid=txid, act=file.unlink)
    given_up(project, "RANGE_EXPIRED")
    project.heed(project.why("HALTED"))
    txid, _ = given_up(project, "RANGE_EXPIRED")
    assert "RANGE_EXPIRED" in project.follow("RANGE_EXPIRED", "See how much", txid=txid)
    project.follow("RANGE_EXPIRED", "Give the batch up", txid=txid)
    project.goes_on()


def given_up(project: Project, error: str) -> tuple[int, Path]:
    """Let a batch be halted whose file is not to count; return its txid and the file."""
    txid = record(project, error, halts=True)
    name, _ = project.rows.popitem()
    return txid, project.folder / name


def plan(project: Project, name: str) -> int:
    """Let a file be planned, and its run end before Spark reads it; return the txid."""
    project.write(name, "UA,7", "DL,1")
    project.fails("tidegate run flights", "SPARK_UNAVAILABLE", exits=75, TIDEGATE_SPARK_REMOTE="sc://127.0.0.1:1")
    return project.newest()


def test_a_source_that_has_changed(project: Project) -> None:
    def changed(name: str) -> tuple[int, str]:
        txid, kept = plan(project, name), project.file(name).read_text()
        project.file(name).write_text(kept.replace("7", "8"))
        project.fails("tidegate run flights", "SOURCE_CHANGED")
        return txid, kept

    txid, kept = changed("b.csv")
    assert "b.csv" in project.follow("SOURCE_CHANGED", "Read what changed", txid=txid)
    project.heed(project.why("HALTED"), act=lambda: project.file("b.csv").write_text(kept))
    assert project.state() == project.clean()
    txid, kept = changed("c.csv")
    project.follow("SOURCE_CHANGED", "Put back", txid=txid, act=lambda: project.file("c.csv").write_text(kept))
    assert project.state() == project.clean()
    txid, _ = changed("d.csv")
    project.counts("d.csv", "UA,8", "DL,1")
    project.follow("SOURCE_CHANGED", "give the batch up", txid=txid)
    assert project.state() == project.clean()
    txid, _ = changed("e.csv")
    project.counts("e.csv")
    project.follow("SOURCE_CHANGED", "give the batch up", txid=txid, act=project.file("e.csv").unlink)
    assert project.state() == project.clean()
    kept = (first := min(project.folder.glob("*"))).read_text()
    first.write_text(kept + "UA,9\n")
    project.fails("tidegate run flights", "SOURCE_CHANGED")
    project.follow("SOURCE_CHANGED", "Put back", only="run", act=lambda: first.write_text(kept))
    first.write_text(kept + "UA,9\n")
    project.write("f.csv", "UA,1")
    project.fails("tidegate run flights", "SOURCE_CHANGED")
    project.heed(project.why("PLAN_FAILED"), act=lambda: first.write_text(kept))
    project.goes_on()


def test_a_source_that_is_away_late_or_unread(project: Project) -> None:
    folder, away = project.folder, project.home / "away"

    folder.rename(away)
    project.fails("tidegate run flights", "SOURCE_UNREADABLE")
    with_reason = project.why("PLAN_FAILED")
    away.rename(folder)
    project.follow("SOURCE_UNREADABLE", "Read the name")
    folder.rename(away)
    project.heed(with_reason, act=lambda: away.rename(folder))
    folder.rename(away)
    project.fails("tidegate run flights", "SOURCE_UNREADABLE")
    project.follow("SOURCE_UNREADABLE", "Mount it", act=lambda: away.rename(folder))
    project.follow("SOURCE_UNREADABLE", "if a batch is halted")
    project.declare(glob="*.csv*")
    project.type("tidegate migrate")
    whole = gzip.compress(b"carrier,cents\nUA,1\n")
    project.file("b.csv.gz").write_bytes(whole[:-9])
    project.fails("tidegate run flights", "SOURCE_UNREADABLE")
    project.follow("SOURCE_UNREADABLE", "A damaged file", txid=project.newest())
    project.file("b2.csv.gz").write_bytes(whole)
    project.counts("b2.csv.gz", "UA,1")
    for code, words in (("SPARK_UNAVAILABLE", "If it is to be down"), ("SOURCE_UNAVAILABLE", "Bring it back")):
        txid = plan(project, f"b{code}.csv")
        project.follow(code, words, only="pause")
        project.fails("tidegate run flights", "PIPELINE_PAUSED", exits=75)
        project.type("tidegate resume flights")
        project.heed(project.why("PLANNED", txid=txid))
    project.write("c.csv", "UA,3")
    project.heed(project.why("UNREAD"))
    project.write("d.csv", "UA,4")
    project.heed(project.why("SOURCE_LATE", TIDEGATE_MIN_FILE_AGE_SECONDS="3600"), TIDEGATE_MIN_FILE_AGE_SECONDS="3600")
    project.heed(project.why("UNREAD"))
    project.heed(project.why("IDLE"))
    project.goes_on()


def test_an_operator_has_paused_or_retired_the_pipeline(project: Project) -> None:
    project.type("tidegate pause flights --reason moved")
    project.fails("tidegate run flights", "PIPELINE_PAUSED", exits=75)
    project.heed(project.why("PAUSED"))
    project.type("tidegate run flights")
    project.type("tidegate pause flights --reason moved")
    project.follow("PIPELINE_PAUSED", "Read who paused")
    project.follow("PIPELINE_PAUSED", "When the reason is gone", txid=1)
    project.goes_on()
    project.type("tidegate retire flights --reason done --yes")
    project.fails("tidegate run flights", "PIPELINE_RETIRED", exits=2)
    project.heed(project.why("RETIRED"))
    project.type("tidegate run flights")
    project.type("tidegate retire flights --reason done --yes")
    project.follow("PIPELINE_RETIRED", "Read who retired")
    kept = (file := project.home / "pipelines/flights.py").read_text()
    project.follow("PIPELINE_RETIRED", "take away the pipeline's file", act=file.unlink)
    project.type("tidegate why flights")
    file.write_text(kept)
    project.follow("PIPELINE_RETIRED", "go on where it stood")
    assert project.state() == project.clean()
    record(project, "PIPELINE_RETIRED")
    project.type("tidegate retire flights --reason done --yes")
    project.type("tidegate reinstate flights")
    project.heed(project.why("FAILED"), act=lambda: project.type("tidegate reinstate flights"))
    project.goes_on()


def test_a_declaration_that_is_not_registered_or_invalid(project: Project) -> None:
    plan(project, "b.csv")
    project.declare()
    project.fails("tidegate run flights", "DECLARATION_CHANGED")
    project.heed(project.why("DECLARATION_CHANGED"))
    project.heed(project.why("HALTED"))
    assert project.state() == project.clean()
    plan(project, "c.csv")
    project.declare()
    project.fails("tidegate run flights", "DECLARATION_CHANGED")
    project.follow("DECLARATION_CHANGED", "register it", only="", leave="run")
    project.end()


def test_a_state_without_its_table(settings: Settings, followed: Followed) -> None:
    made = Project(CommandLine(settings, {HOME_VARIABLE: str(settings.home)}), followed)
    made.declare()
    (settings.home / "migrations").mkdir()
    made.write("a.csv", "UA,1")
    made.fails("tidegate run flights", "SCHEMA_OUT_OF_DATE")
    missing = made.why("NOT_REGISTERED")
    made.fails("tidegate migrate", "SCHEMA_OUT_OF_DATE")
    made.follow("SCHEMA_OUT_OF_DATE", "write its migration first")
    made.follow("SCHEMA_OUT_OF_DATE", "Bring the database up to date")
    write_by_hand(made, "INSERT INTO state.daily (carrier, flights, cents, txid) VALUES ('UA', 1, 1, 1)")
    made.declare()
    made.fails("tidegate migrate", "DECLARATION_CHANGED")
    (empty,) = re.findall(r"`(SET [^`]*)`", made.line("error", "DECLARATION_CHANGED").stdout)
    made.follow("DECLARATION_CHANGED", "a table has rows", act=lambda: run_as_owner(made, *empty.split("; ")))
    made.heed(missing)
    made.follow("SCHEMA_OUT_OF_DATE", "if a batch is halted", only="run")
    assert made.state() == made.clean()
    (first,) = (settings.home / "migrations").glob("0001*.py")
    other = first.with_name("0001_of_another_branch.py")
    other.write_text(first.read_text())
    made.fails("tidegate migrate", "SCHEMA_OUT_OF_DATE")
    made.follow("SCHEMA_OUT_OF_DATE", "two migrations have one number", act=other.unlink)
    text = first.read_text()
    first.unlink()
    newer = made.why("SCHEMA_OUT_OF_DATE")
    assert newer.error == "SCHEMA_OUT_OF_DATE"
    made.follow("SCHEMA_OUT_OF_DATE", "update the project on this machine", act=lambda: first.write_text(text))
    made.heed(newer)
    made.goes_on()


def test_code_that_is_broken_or_gone(project: Project) -> None:
    file = project.home / "pipelines/flights.py"
    plan(project, "b.csv")
    kept = file.read_text()
    file.write_text("raise ZeroDivisionError\n")
    project.heed(project.why("NOT_LOADED"), act=lambda: file.write_text(kept))
    file.unlink()
    project.fails("tidegate run flights", "UNKNOWN_PIPELINE", exits=2)
    gone = project.why("NOT_DECLARED")
    project.follow("UNKNOWN_PIPELINE", "See the declared pipelines")
    project.follow("UNKNOWN_PIPELINE", "bring the file", act=lambda: file.write_text(kept))
    file.unlink()
    project.heed(gone, act=lambda: file.write_text(kept))
    project.heed(project.why("PLANNED"))
    project.goes_on()


def test_a_request_that_is_refused(project: Project) -> None:
    project.write("b.csv", "UA,1")
    following = project.newest() + 1
    project.fails(f"tidegate inspect flights --txid {following + 7}", "UNKNOWN_BATCH", exits=2)
    project.follow("UNKNOWN_BATCH", "newest is last")
    assert project.state() == project.clean()
    project.fails(f"tidegate run flights --from-txid {following + 7} --to-txid {following + 7}", "RANGE_REFUSED", exits=2)
    project.follow("RANGE_REFUSED", "See which txids")
    project.write("c.csv", "UA,1")
    one = f"tidegate run flights --from-txid {following + 1} --to-txid {following + 1}"
    project.follow("RANGE_REFUSED", "Give a range", act=lambda: project.type(one))
    assert project.state() == project.clean()
    project.fails(f"tidegate skip flights {following} --reason ' '", "USAGE_ERROR", exits=2)
    project.follow("USAGE_ERROR", "Read what the verb takes")
    txid = plan(project, "d.csv")
    project.file("d.csv").unlink()
    project.fails("tidegate run flights", "SOURCE_CHANGED")
    project.fails(f"tidegate skip flights {txid} --reason gone", "USAGE_ERROR", exits=2)
    assert "Add --yes to do it" in project.printed
    project.counts("d.csv")
    project.follow(
        "USAGE_ERROR", "Add --yes to do it", act=lambda: project.type(f"tidegate skip flights {txid} --reason gone --yes")
    )
    project.goes_on()


WRONG_SETTINGS = {
    "SETTINGS_INVALID": ({"TIDEGATE_LOCK_TIMEOUT_SECONDS": "long"}, "else repeat the command"),
    "ACCESS_REFUSED": ({"PGUSER": "nobody"}, "If a batch is halted"),
}


def test_settings_that_cannot_be_used(project: Project) -> None:
    for code, (wrong, then) in WRONG_SETTINGS.items():
        project.write(f"{code}.csv", "UA,1")
        printed = project.fails("tidegate run flights", code, **wrong)
        if code == "SETTINGS_INVALID":
            project.follow(code, "where the message says")
            project.follow(code, "Workers read settings", act=lambda: project.type("tidegate status"))  # a new process
            assert f"environment {''.join(wrong)}" in printed
        else:
            assert "nobody" in printed
            project.follow(code, "Read the message")
            project.heed(project.why(code, **wrong), **wrong)
        project.follow(code, "tidegate settings", **(wrong if code == "ACCESS_REFUSED" else {}))
        assert code == "SETTINGS_INVALID" or [
            line for line in project.printed.splitlines() if set(wrong) & set(line.split())
        ], project.printed
        if code == "ACCESS_REFUSED":
            project.follow(code, "Correct the setting")
        project.follow(code, then)
        project.type("tidegate run flights")
    project.end()


def run_as_owner(project: Project, *statements: str) -> None:
    with migrations.connected(project.line.settings) as connection:
        for statement in statements:
            connection.execute(sa.text(statement))


def write_by_hand(project: Project, statement: str) -> None:
    run_as_owner(project, "SET tidegate.writer = 'flights'", statement)


def rows_of(project: Project, statement: sa.Executable) -> list[sa.Row]:
    with migrations.connected(project.line.settings) as connection:
        return list(connection.execute(statement))


def record(project: Project, error: str, *, halts: bool = False) -> int:
    """Plan a batch and let the ledger have this error of an attempt at it, which may halt it; return its txid."""
    txid = plan(project, f"b{project.newest():04d}.csv")
    fail(project, txid, error, halts=halts)
    return txid


def fail(project: Project, txid: int, error: str, *, halts: bool = False) -> None:
    with store_of(project) as (store, spec):
        store.retry("flights", txid, "a test", "another error")
        attempt = store.start_attempt(spec, txid, "test")
        assert isinstance(attempt, Attempt)
        store.fail_attempt(attempt, f"{error}: it is made by a test.")
        if halts:
            store.halt_batch("flights", txid, f"{error}: it is made by a test.")


@contextmanager
def store_of(project: Project) -> Iterator[tuple[StateStore, PipelineSpec]]:
    environment = {**in_process.environment_of(project.line.settings), **project.line.environment}
    with in_process.started_with(environment, alone=False), StateStore.connect(project.line.settings) as store:
        yield store, find_pipeline("flights").spec


# Errors that are not made for real, as they take servers or machines: the ledger has them, and these are steps of their pages.
FAILED = {
    "ATTEMPT_TIMED_OUT": ("Compare how long", "If the run has ended"),
    "ROWS_LOST": ("compare the sums", "Correct the transform"),
    "SPARK_FAILED": ("Read the error", "after a fix"),
    "TIDEGATE_ERROR": ("look for triggers", "`tidegate retry"),
    "SOURCE_UNAVAILABLE": ("See which source", "If the run has ended"),
    "SPARK_UNAVAILABLE": ("See whether it runs", "If the run has ended"),
    "PARTITION_UNAVAILABLE": ("If the run has ended",),
    "LOCK_HELD": ("If runs have failed",),
    "RETRYABLE_ERROR": ("does not pass",),
}
# Steps that say what to do if it passes, and a run that does.
PASSES = {"ROWS_LOST": "If a later attempt", "TIDEGATE_ERROR": "If a later attempt", "RETRYABLE_ERROR": "Try again"}
# The same, if they have halted the batch.
HALTED = {
    "EXECUTORS_UNPREPARED": ("See what is set", "If a batch is halted"),
    "SETTINGS_INVALID": ("See each setting", "if a batch is halted"),
    "ACCESS_REFUSED": ("Compare the settings", "If a batch is halted"),
    "SOURCE_UNREADABLE": ("Read the name", "if a batch is halted"),
    "LISTENER_NOT_TRUSTED": ("If a batch is halted",),
}


def causes_of(project: Project, errors: Mapping[str, tuple[str, ...]], *, halts: bool = False) -> tuple[int, dict[str, Answer]]:
    """Let one batch have these errors in turn, look at each as its page says, and return its txid and the causes."""
    txid, causes = plan(project, f"b{project.newest():04d}.csv"), {}
    for error, (*looks, _) in errors.items():
        fail(project, txid, error, halts=halts)
        causes[error] = project.why("HALTED" if halts else "FAILED")
        assert causes[error].error == error
        assert causes[error].commands == (f"tidegate retry flights {txid}" if halts else "tidegate run flights",)
        for words in looks:
            project.follow(error, words, txid=txid)
    return txid, causes


def test_errors_that_the_ledger_has(project: Project) -> None:
    txid, causes = causes_of(project, FAILED)
    project.type("tidegate migrate")
    project.type(f"tidegate retry flights {txid}")
    assert project.state() == project.clean()
    record(project, "SPARK_FAILED")
    for cause in causes.values():
        project.heed(cause)
        assert project.state() == project.clean()
    project.type("tidegate retry flights")
    for error, (*_, goes_on) in FAILED.items():
        project.follow(error, goes_on, txid=txid, done=True)
    for error, passes in PASSES.items():
        project.follow(error, passes, leave="tidegate")
    _, causes = causes_of(project, HALTED, halts=True)
    for cause in causes.values():
        project.heed(cause)
        assert project.state() == project.clean()
    record(project, "SETTINGS_INVALID", halts=True)
    project.type("tidegate retry flights")
    for error, (*_, goes_on) in HALTED.items():
        project.follow(error, goes_on, done=True)
    project.goes_on()


def test_attempts_that_fall_silent_and_batches_that_are_given_up(project: Project) -> None:
    first = plan(project, "b.csv")
    with store_of(project) as (store, spec):
        store.fail_attempt(store.start_attempt(spec, first, "test"), "SPARK_FAILED: a test")
        former = store.start_attempt(spec, first, "test")
        store.start_attempt(spec, first, "test")
        assert not store.keep_alive(former)
        second = plan(project, "b2.csv")
        with pytest.raises(CommitOutOfOrder):
            store.commit_batch(spec, second, "test")
    assert "attempt 3" in project.follow("ATTEMPT_FENCED", "To see which attempt", txid=first)
    project.fails("tidegate retire flights --reason done --yes", "ATTEMPT_NOT_SEALED", exits=75)
    assert "attempt 3" in project.follow("ATTEMPT_NOT_SEALED", "To see who is at work", txid=first)
    project.heed(project.why("FAILED_BEFORE"))
    with migrations.connected(project.line.settings) as connection:
        connection.execute(sa.update(tables.attempt).values(seen_at=sa.func.now() - sa.text("interval '5 minutes'")))
    project.heed(project.why("SILENT"))
    assert project.state() == project.clean()
    project.follow("COMMIT_OUT_OF_ORDER", "Find out what", txid=plan(project, "c.csv"))
    fourth = plan(project, "d.csv")
    with store_of(project) as (store, spec):
        store.fail_attempt(store.start_attempt(spec, fourth, "test"), "BAD_KEY: a test", is_poison=True)
        assert store.give_up("flights", fourth, "the pipeline's policy", "it failed in try 1 of 1, with BAD_KEY: a", tries=1)
    project.heed(project.why("GIVEN_UP"))
    project.goes_on()


def test_records_that_were_set_aside(project: Project) -> None:
    more = "check={{'paid': 'cents > {}'}}, on_poison='quarantine',"
    project.declare(**CONTENT["TRANSFORM_FAILED"][2])
    project.type("tidegate migrate")
    project.write("a2.csv", "UA,2", "AA,-1")
    project.fails("tidegate run flights", "TRANSFORM_FAILED")
    project.declare(more=more.format(0))
    project.type("tidegate migrate")
    project.follow("TRANSFORM_FAILED", "describe good records", act=lambda: project.type("tidegate retry flights"))
    project.write("b.csv", "UA,1", "AA,-1")
    project.follow("MALFORMED_RECORD", "set such records aside", act=lambda: project.type("tidegate run flights"))
    assert "paid" in project.printed
    project.heed(project.why("QUARANTINED"))
    project.declare(more=more.format(-2))
    project.type("tidegate migrate")
    project.type("tidegate quarantine replay flights --reason corrected")
    project.goes_on()


def test_states_that_were_changed_by_hand(own_project: Project, as_owner: AsOwner) -> None:
    project = own_project
    daily = "state.daily"

    def write(statement: str, page: str = "") -> None:
        (setting,) = re.findall(r"`(SET tidegate\.writer = '\w+')`", page) or ["SET tidegate.writer = 'flights'"]
        with migrations.connected(project.line.settings) as connection:
            connection.execute(sa.text(setting))
            connection.execute(sa.text(statement))

    page = project.line("error", "GUARD_MISMATCH").stdout
    for ask in ("heed", "follow"):
        write(f"UPDATE {daily} SET txid = 99 WHERE carrier = 'UA'")
        project.write(f"b{ask}.csv", "UA,7")
        project.fails("tidegate run flights", "GUARD_MISMATCH")
        txid = project.newest()
        back = partial(write, f"UPDATE {daily} SET txid = 1 WHERE carrier = 'UA'", page)
        project.follow("GUARD_MISMATCH", "Find the rows", txid=txid)
        select = re.findall(r"`(SELECT [^`]*)`", page)[0].replace("7", str(txid))
        assert len(rows_of(project, sa.text(select))) == 1
        if ask == "heed":
            project.heed(project.why("HALTED"), act=back)
        else:
            project.follow("GUARD_MISMATCH", "Put the rows back", act=back)
            project.follow("GUARD_MISMATCH", "If a batch is halted", txid=txid)
        assert project.state() == project.clean()
    as_owner(sa.text(f"ALTER TABLE {daily} DISABLE TRIGGER single_writer"))
    project.write("b.csv", "UA,7")
    refusal = project.fails("tidegate run flights", "GUARD_MISMATCH")
    (guard,) = re.findall(r"as the table's owner: (.*)", refusal)
    project.follow("GUARD_MISMATCH", "Find out who wrote them", act=lambda: as_owner(sa.text(guard)))
    project.follow("GUARD_MISMATCH", "If a plan has failed", only="run")
    assert project.state() == project.clean()
    as_owner(sa.text(f"ALTER TABLE {daily} ALTER COLUMN cents TYPE bigint"))
    project.write("c.csv", "UA,7")
    project.fails("tidegate run flights", "GUARD_MISMATCH")
    project.follow("GUARD_MISMATCH", "If the table is not as declared")
    project.type("tidegate retry flights")
    project.goes_on()


def test_a_ledger_that_was_restored_or_damaged(own_project: Project, as_owner: AsOwner) -> None:
    project = own_project
    for ask in ("heed", "follow"):
        as_owner(sa.update(tables.cursor).values(epoch="1/2/3"))
        project.write(f"b{ask}.csv", "UA,7")
        project.fails("tidegate run flights", "HOLE_DETECTED")
        if ask == "heed":
            project.heed(project.why("HOLE_DETECTED"))
            project.type("tidegate run flights")
        else:
            project.follow("HOLE_DETECTED", "Read which txids")
            project.follow("HOLE_DETECTED", "Then accept the loss")
        assert project.state() == project.clean()
    as_owner(sa.text("ALTER TABLE state.daily RENAME TO elsewhere"))
    project.write("c.csv", "UA,7")
    project.fails("tidegate run flights", "HOLE_DETECTED")
    cause = project.why("PLAN_FAILED")
    rename = sa.text("ALTER TABLE state.elsewhere RENAME TO daily")
    project.follow("HOLE_DETECTED", "rename it back", act=lambda: as_owner(rename))
    project.heed(cause)
    assert project.state() == project.clean()
    with store_of(project) as (store, _):
        ((history,),) = rows_of(project, sa.select(tables.cursor.c.history))
        file = store.witness.file_of("flights", str(history))
    file.write_text("{")
    project.write("d.csv", "UA,7")
    project.fails("tidegate run flights", "HOLE_DETECTED")
    damaged = project.why("HOLE_DETECTED")
    project.follow("HOLE_DETECTED", "remove that file", act=file.unlink)
    project.heed(damaged)
    project.type("tidegate run flights")
    assert project.state() == project.clean()
    cursor, txid = sa.update(tables.cursor), project.newest()
    as_owner(cursor.values(txid=1))
    project.write("d2.csv", "UA,7")
    project.fails("tidegate run flights", "HOLE_DETECTED")
    project.heed(project.why("HOLE_DETECTED"), act=lambda: as_owner(cursor.values(txid=txid)))
    project.type("tidegate run flights")
    assert project.state() == project.clean()
    batch = tables.batch
    for ask in ("heed", "follow"):
        txid = plan(project, f"e{ask}.csv")
        this = batch.c.txid == txid
        ((kept,),) = rows_of(project, sa.select(batch.c.source_metadata).where(this))
        as_owner(sa.update(batch).where(this).values(source_metadata=kept[:-1] + b" "))
        project.fails("tidegate run flights", "METADATA_CORRUPT")
        back = partial(as_owner, sa.update(batch).where(this).values(source_metadata=kept))
        if ask == "heed":
            project.heed(project.why("PLAN_FAILED"), act=back)
        else:
            project.follow("METADATA_CORRUPT", "See what is damaged", txid=txid)
            project.follow("METADATA_CORRUPT", "restore the row", act=back)
            project.follow("METADATA_CORRUPT", "If a batch is halted", txid=txid)
        assert project.state() == project.clean()
    project.goes_on()


def test_servers_that_are_away(project: Project) -> None:
    project.write("b.csv", "UA,7")
    project.fails("tidegate run flights", "STORE_UNAVAILABLE", exits=75, PGPORT="1")
    away = project.why("STORE_UNAVAILABLE", PGPORT="1")
    assert away.commands == ("tidegate up",)
    project.heed(replace(away, commands=()), act=lambda: project.type("tidegate run flights"))
    assert project.state() == project.clean()
    project.write("c.csv", "UA,7")
    project.follow("STORE_UNAVAILABLE", "server of your own")
    project.follow("STORE_UNAVAILABLE", "If runs have failed")
    assert project.state() == project.clean()

    page = project.line("error", "LOCK_HELD").stdout
    database, administrator = project.line.settings.pg_database, project.line.settings.conninfo(user="postgres")

    def ask(statement: str) -> None:
        with closing(psycopg2.connect(**administrator)) as connection, connection, connection.cursor() as cursor:
            cursor.execute(statement)
            assert not statement.startswith("SELECT") or cursor.fetchall()

    ask(f"ALTER DATABASE {database} CONNECTION LIMIT 0")
    project.fails("tidegate run flights", "STORE_UNAVAILABLE", exits=75)
    room = f"ALTER DATABASE {database} CONNECTION LIMIT -1"
    project.follow("STORE_UNAVAILABLE", "too many connections", act=lambda: ask(room))

    with closing(psycopg2.connect(**administrator)) as holder:
        holder.cursor().execute("LOCK TABLE tidegate.pipeline IN ACCESS EXCLUSIVE MODE")
        pid = str(holder.info.backend_pid)
        short = {"TIDEGATE_LOCK_TIMEOUT_SECONDS": "1"}
        assert pid in project.fails("tidegate pause flights --reason moved", "LOCK_HELD", exits=75, **short)
        look, end = (line.strip().replace("4711", pid) for line in page.splitlines() if line.strip().startswith("SELECT "))
        project.follow("LOCK_HELD", "Look at the session", act=lambda: ask(look))
        project.follow("LOCK_HELD", "or end it", act=lambda: ask(end))
    project.write("d.csv", "UA,7")
    project.follow("LOCK_HELD", "If runs have failed")
    assert project.state() == project.clean()

    (password := project.home / "password").write_text("secret")
    airflow = {"TIDEGATE_AIRFLOW_URL": "http://127.0.0.1:1", "TIDEGATE_AIRFLOW_PASSWORD_FILE": str(password)}
    project.write("e.csv", "UA,7")
    assert "Without Airflow: tidegate run flights\n" in project.fails("tidegate trigger flights --wait", "SETTINGS_INVALID")
    backfill = project.fails("tidegate backfill flights --from-txid 1 --to-txid 99", "SETTINGS_INVALID")
    assert "Without Airflow: tidegate run flights --from-txid 1 --to-txid 99\n" in backfill
    project.fails("tidegate trigger flights --wait", "AIRFLOW_UNAVAILABLE", exits=75, **airflow)
    project.follow("AIRFLOW_UNAVAILABLE", "If Airflow is elsewhere")
    project.follow("AIRFLOW_UNAVAILABLE", "Start the run again")
    project.follow("RUN_UNFINISHED", "See how far")
    project.follow("RUN_UNFINISHED", "Run the same command again", act=lambda: project.type("tidegate run flights"))
    project.goes_on()


def sealed(project: Project, name: str) -> int:
    """Let a file's batch be processed, and its commit be refused by a check that is taken back; return the txid."""
    kept = str(project.version)
    project.declare(more=PAID.format(LARGE), version=kept)
    project.write(name, "UA,7")
    project.fails("tidegate run flights", "CHECK_FAILED")
    project.declare(version=kept)
    txid = project.newest()
    with store_of(project) as (store, _):
        assert store.retry("flights", txid, "a test", "the check was wrong") == [txid]
    return txid


def test_batches_that_are_processed(own_project: Project, as_owner: AsOwner) -> None:
    """Commit in the next run, or are processed again; they cannot be skipped."""
    project = own_project
    sealed(project, "b.csv")
    project.heed(project.why("WAITS_FOR_COMMIT"))
    assert project.state() == project.clean()
    sealed(project, "c.csv")
    project.declare()
    project.type("tidegate migrate")
    project.heed(project.why("STALE"))
    assert project.state() == project.clean()
    txid = sealed(project, "d.csv")
    project.fails(f"tidegate skip flights {txid} --reason wrong --yes", "RANGE_REFUSED", exits=2)
    project.follow("RANGE_REFUSED", "there is no way", act=lambda: project.type("tidegate run flights"))
    assert project.state() == project.clean()
    staging = sa.text(
        "SELECT format('DROP TABLE %s', oid::regclass) FROM pg_class WHERE relnamespace = 'staging'::regnamespace"
    )

    def lost(name: str) -> int:
        txid = sealed(project, name)
        for (drop,) in rows_of(project, staging):
            as_owner(sa.text(drop))
        return txid

    txid = lost("e.csv")
    project.follow("UNPROCESSED", "Mostly nothing", act=lambda: project.type("tidegate run flights"))
    assert f"flights {txid}" in project.follow("UNPROCESSED", "See why the attempts end", txid=txid)
    txid, kept = lost("f.csv"), project.file("f.csv").read_text()
    project.file("f.csv").unlink()
    project.fails("tidegate run flights", "SOURCE_CHANGED")
    project.follow("UNPROCESSED", "Follow the page of the error", act=lambda: project.file("f.csv").write_text(kept))
    project.follow("SOURCE_CHANGED", "Put back", txid=txid)
    assert project.state() == project.clean()
    project.goes_on()


def test_states_that_are_declared_otherwise(own_project: Project) -> None:
    project = own_project
    project.declare(glob="*.cs*", version="1")
    project.fails("tidegate migrate", "DECLARATION_CHANGED")
    project.follow("DECLARATION_CHANGED", "is another one", act=lambda: project.declare(glob="*.cs*"))
    project.type("tidegate migrate")
    kept = (file := project.home / "pipelines/flights.py").read_text()
    project.declare(cents='Sum("cents", "bigint")')
    project.write("b.csv", "UA,7")
    project.fails("tidegate run flights", "DECLARATION_CHANGED")
    project.follow("DECLARATION_CHANGED", "take it back", leave="tidegate", act=lambda: file.write_text(kept))
    project.type("tidegate run flights")
    assert project.state() == project.clean()
    project.write("c.csv", f"UA,{LARGE}")
    project.fails("tidegate run flights", "OVERFLOW")
    project.declare(cents='Sum("cents", "numeric(38,0)")')
    project.fails("tidegate migrate", "DECLARATION_CHANGED")
    project.follow("DECLARATION_CHANGED", "it names each change")
    project.type('tidegate migrate --new "wider"')
    project.type("tidegate migrate")
    project.follow("OVERFLOW", "type is too small", txid=project.newest())
    project.goes_on()


def test_a_rebuild_that_is_halted(own_project: Project) -> None:
    project = own_project
    wider = {"cents": 'Sum("cents", "bigint")'}
    broken = transform("selectExpr('carrier', \"IF(cents = 2, raise_error('two'), cents) AS cents\")")
    project.declare(**wider, more=broken)
    project.fails("tidegate rebuild flights --yes", "TRANSFORM_FAILED")
    cause = project.why("HALTED", pipeline="flights__v2")
    assert cause.commands == ("tidegate rebuild flights --yes",)
    assert "migrate" not in cause.advice
    project.heed(cause, act=partial(project.declare, **wider, version="2"))
    project.type('tidegate migrate --new "wider"')
    project.type("tidegate migrate")
    assert project.state() == project.clean()
    project.declare(more=broken)
    project.fails("tidegate rebuild flights --yes", "TRANSFORM_FAILED")
    project.heed(project.why("HALTED", pipeline="flights__v3"), skips=True)
    project.counts("a.csv")
    project.type("tidegate rebuild flights --yes")
    project.type('tidegate migrate --new "narrow"')
    project.type("tidegate migrate")
    project.declare()
    project.type("tidegate migrate")
    project.goes_on()


def test_a_policy_that_leaves_batches_out(project: Project) -> None:
    project.declare(more="on_poison='skip',")
    project.type("tidegate migrate")
    txid = record(project, "BAD_KEY")
    project.follow("BATCH_RETRIED", "Find the real error", txid=txid)
    project.follow("BATCH_RETRIED", "Follow the page", txid=txid)
    assert project.state() == project.clean()
    project.write("c.csv", "AA,x", counts=False)
    project.follow("BATCH_RETRIED", "if bad batches may be left out", act=lambda: project.type("tidegate run flights"))
    project.goes_on()


def test_a_constraint_that_refuses_rows(own_project: Project, as_owner: AsOwner) -> None:
    project = own_project
    drop = sa.text("ALTER TABLE state.daily DROP CONSTRAINT few")
    for ask in ("heed", "follow"):
        as_owner(sa.text("ALTER TABLE state.daily ADD CONSTRAINT few CHECK (cents < 100) NOT VALID"))
        project.write(f"b{ask}.csv", "UA,100")
        assert "Drop it" in project.fails("tidegate run flights", "PERMANENT_ERROR")
        if ask == "heed":
            project.heed(project.why("HALTED"), act=lambda: as_owner(drop))
        else:
            project.follow("PERMANENT_ERROR", "Read the message", act=lambda: as_owner(drop))
            project.follow("PERMANENT_ERROR", "See what the pipeline waits")
            project.follow("PERMANENT_ERROR", "After the fix")
        assert project.state() == project.clean()
    project.goes_on()


def test_an_attempt_that_takes_too_long(project: Project) -> None:
    sleeps = transform("selectExpr('carrier', \"IF(java_method('java.lang.Thread', 'sleep', 1500L) = '', 0, cents) AS cents\")")
    project.declare(more=sleeps + "message_timeout_seconds=1,")
    project.type("tidegate migrate")
    project.write("b.csv", "UA,1")
    project.fails("tidegate run flights", "ATTEMPT_TIMED_OUT", exits=75)
    project.follow("ATTEMPT_TIMED_OUT", "raise `message_timeout_seconds`", act=lambda: project.declare(more=sleeps))
    project.type("tidegate migrate")
    project.type("tidegate run flights")
    project.end()


def test_plans_that_have_failed(project: Project) -> None:
    for code in ("MALFORMED_RECORD", "RANGE_EXPIRED"):
        with store_of(project) as (store, _):
            assert store.fail_plan("flights", store.begin_plan("flights", "a test"), "a test", f"{code}: it is made by a test.")
        cause = project.why("PLAN_FAILED")
        assert cause.error == code
        project.heed(cause, act=partial(project.write, f"{code}.csv", "UA,1"))
        assert project.state() == project.clean()
    project.goes_on()


def test_columns_and_acks(own_project: Project) -> None:
    project = own_project
    project.write("b.csv", "UA,1,x", header="carrier,cents,city", counts=False)
    project.counts("b.csv", "UA,1")
    project.type("tidegate run flights")
    project.heed(project.why("NEW_COLUMNS"), act=lambda: project.declare(source=", ignored_columns=['city']"))
    (in_the_way := project.home / "data/done/3").parent.mkdir()
    project.declare(source=", ignored_columns=['city'], done_folder='data/done'")
    project.type("tidegate migrate")
    project.write("c.csv", "UA,1")
    in_the_way.touch()
    project.type("tidegate run flights")
    cause = project.why("ACK_OUTSTANDING")
    in_the_way.unlink()
    project.heed(cause)
    assert [file.name for file in in_the_way.glob("*")] == [project.file("c.csv").name]
    project.goes_on()


def test_a_port_that_another_account_has(project: Project, free_port: Callable[[], int]) -> None:
    port, other = free_port(), account()
    spark = {"TIDEGATE_SPARK_REMOTE": f"sc://127.0.0.1:{port}"}
    project.write("b.csv", "UA,7")
    with impostor(other, LISTENER, "127.0.0.1", port):
        assert f"user {other}" in project.fails("tidegate run flights", "LISTENER_NOT_TRUSTED", **spark)
        project.follow("LISTENER_NOT_TRUSTED", "Read which user", **spark)
    project.follow("LISTENER_NOT_TRUSTED", "no business there", leave="tidegate up")
    project.follow("LISTENER_NOT_TRUSTED", "If a batch is halted", only="run")
    project.goes_on()


def test_the_advice_that_was_followed(followed: Followed, request: pytest.FixtureRequest) -> None:
    part, report = followed.report()
    request.config.stash[ADVICE] = report
    ran = {item.name for item in request.session.items if item.path == request.path}
    if {name for name in globals() if name.startswith("test_")} <= ran:
        assert part >= 0.8, report
        assert "wrong" not in report, report
