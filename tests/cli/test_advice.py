"""Advice of `why` and of error pages is right: tests make a fault, do what is printed, and the pipeline goes on."""

from collections.abc import Iterator

import pytest

from tests.cli.advice import Followed, Project
from tests.cli.conftest import CommandLine
from tests.layers import ADVICE
from tests.store import project as projects
from tidegate.state_store import Settings


@pytest.fixture(scope="module")
def followed() -> Followed:
    """The advices that this module's tests have followed."""
    return Followed()


@pytest.fixture
def project(settings: Settings, followed: Followed) -> Iterator[Project]:
    """A project whose pipeline flights has one committed batch."""
    made = Project(CommandLine(settings, {projects.HOME_VARIABLE: str(settings.home)}), followed)
    made.declare()
    (settings.home / "migrations").mkdir()
    made.type('tidegate migrate --new "flights"')
    made.type("tidegate migrate")
    made.write("a.csv", "UA,1", "AA,2")
    made.type("tidegate run flights")
    return made


def transform(expression: str) -> str:
    """Return the part of a declaration that transforms rows."""
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


def test_content_that_fails(project: Project) -> None:
    """Is corrected by the declaration, as `why` and as the page say, or given up."""
    txid = 1
    project.write("dl.csv", "DL,9")
    project.type("tidegate run flights")
    for code, (row, counts, wrong, right) in CONTENT.items():

        def fail(code: str = code, row: str = row, counts: bool = counts, wrong: dict[str, str] = wrong) -> int:
            project.declare(**wrong)
            project.type("tidegate migrate")
            name = f"b{len(project.rows):03d}{code}.csv"
            project.write(name, "UA,1", row)
            project.fails("tidegate run flights", code)
            if not counts:
                project.rows[name] = [("UA", "1")]
            return len(project.line.json("inspect", "flights"))

        def correct(right: dict[str, str] = right) -> None:
            project.declare(**right)

        txid = fail()
        assert code in project.follow(code, "tidegate why flights", txid=txid)
        project.heed(project.why("HALTED"), act=correct, also="tidegate migrate")
        project.follow(code, "tidegate migrate", txid=txid, done=True)
        assert project.state() == project.clean()
        if code == "DECLARATION_INVALID":
            project.follow(code, "Correct the transform", act=correct)
            continue
        txid = fail()
        project.rows.popitem()
        project.follow(code, "tidegate skip", txid=txid)
        correct()
        project.type("tidegate migrate")
        assert project.state() == project.clean()
    project.goes_on()


def plan(project: Project, name: str) -> int:
    """Let a file be planned, and its run end before Spark reads it; return the txid."""
    project.write(name, "UA,7", "DL,1")
    project.fails("tidegate run flights", "SPARK_UNAVAILABLE", exits=75, TIDEGATE_SPARK_REMOTE="sc://127.0.0.1:1")
    return len(project.line.json("inspect", "flights"))


def test_a_source_that_has_changed(project: Project) -> None:
    """Is put back, or its batch is given up; a folder that is away is brought back."""

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
    project.rows["d.csv"] = [("UA", "8"), ("DL", "1")]
    project.follow("SOURCE_CHANGED", "give the batch up", txid=txid)
    assert project.state() == project.clean()
    txid, _ = changed("e.csv")
    project.give_up("e.csv")
    project.follow("SOURCE_CHANGED", "give the batch up", txid=txid, act=project.file("e.csv").unlink)
    assert project.state() == project.clean()
    kept = project.file("a.csv").read_text()
    project.file("a.csv").write_text(kept + "UA,9\n")
    project.fails("tidegate run flights", "SOURCE_CHANGED")
    project.heed(project.why("PLAN_FAILED"), act=lambda: project.file("a.csv").write_text(kept))
    project.goes_on()


def test_a_source_that_is_away_late_or_unread(project: Project) -> None:
    """Is brought back; what is left waits for a run."""
    folder, away = project.file("").parent / "flights", project.home / "away"

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
    txid = plan(project, "b.csv")
    project.heed(project.why("PLANNED", txid=txid))
    project.write("c.csv", "UA,3")
    project.heed(project.why("UNREAD"))
    project.write("d.csv", "UA,4")
    project.heed(project.why("SOURCE_LATE", TIDEGATE_MIN_FILE_AGE_SECONDS="3600"), TIDEGATE_MIN_FILE_AGE_SECONDS="3600")
    project.heed(project.why("UNREAD"))
    project.heed(project.why("IDLE"))
    project.goes_on()


def test_an_operator_has_paused_or_retired_the_pipeline(project: Project) -> None:
    """It is let go on."""
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
    project.follow("PIPELINE_RETIRED", "go on where it stood")
    project.goes_on()


def test_a_declaration_that_is_not_registered_or_invalid(project: Project) -> None:
    """Is registered, corrected or taken back."""
    plan(project, "b.csv")
    project.declare()
    project.fails("tidegate run flights", "DECLARATION_CHANGED")
    project.heed(project.why("DECLARATION_CHANGED"))
    project.heed(project.why("HALTED"))
    assert project.state() == project.clean()
    plan(project, "c.csv")
    project.declare()
    project.fails("tidegate run flights", "DECLARATION_CHANGED")
    project.follow("DECLARATION_CHANGED", "register it")
    assert project.state() == project.clean()


def test_a_state_without_its_table(settings: Settings, followed: Followed) -> None:
    """Is migrated, registered and read."""
    made = Project(CommandLine(settings, {projects.HOME_VARIABLE: str(settings.home)}), followed)
    made.declare()
    (settings.home / "migrations").mkdir()
    made.write("a.csv", "UA,1")
    made.fails("tidegate run flights", "SCHEMA_OUT_OF_DATE")
    missing = made.why("NOT_REGISTERED")
    made.fails("tidegate migrate", "SCHEMA_OUT_OF_DATE")
    made.follow("SCHEMA_OUT_OF_DATE", "write its migration first")
    made.follow("SCHEMA_OUT_OF_DATE", "Bring the database up to date")
    made.heed(missing)
    made.follow("SCHEMA_OUT_OF_DATE", "if a batch is halted", only="run")
    assert made.state() == made.clean()
    (first,) = (settings.home / "migrations").glob("0001*.py")
    other = first.with_name("0001_of_another_branch.py")
    other.write_text(first.read_text())
    made.fails("tidegate migrate", "SCHEMA_OUT_OF_DATE")
    made.follow("SCHEMA_OUT_OF_DATE", "two migrations have one number", act=other.unlink, fill=" 'again'")
    made.goes_on()


def test_code_that_is_broken_or_gone(project: Project) -> None:
    """Is corrected, or brought back."""
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
    """Is corrected as the page says."""
    project.write("b.csv", "UA,1")
    project.fails("tidegate inspect flights --txid 9", "UNKNOWN_BATCH", exits=2)
    project.follow("UNKNOWN_BATCH", "newest is last")
    assert project.state() == project.clean()
    project.fails("tidegate run flights --from-txid 9 --to-txid 9", "RANGE_REFUSED", exits=2)
    project.follow("RANGE_REFUSED", "See which txids")
    project.write("c.csv", "UA,1")
    project.follow("RANGE_REFUSED", "Give a range", act=lambda: project.type("tidegate run flights --from-txid 3 --to-txid 3"))
    assert project.state() == project.clean()
    project.fails("tidegate skip flights 3 --reason ' '", "USAGE_ERROR", exits=2)
    project.follow("USAGE_ERROR", "Read what the verb takes")
    txid = plan(project, "d.csv")
    project.file("d.csv").unlink()
    project.fails("tidegate run flights", "SOURCE_CHANGED")
    project.fails(f"tidegate skip flights {txid} --reason gone", "USAGE_ERROR", exits=2)
    assert "Add --yes to do it" in project.printed
    project.give_up("d.csv")
    project.follow(
        "USAGE_ERROR",
        "Add --yes to do it",
        act=lambda: project.type(f"tidegate skip flights {txid} --reason gone --yes"),
    )
    project.goes_on()


WRONG_SETTINGS = {
    "SETTINGS_INVALID": ({"TIDEGATE_LOCK_TIMEOUT_SECONDS": "long"}, "else repeat the command"),
    "ACCESS_REFUSED": ({"PGUSER": "nobody"}, "If a batch is halted"),
}


def test_settings_that_cannot_be_used(project: Project) -> None:
    """Are corrected where the message or `settings` says that they come from; then the command is typed again."""
    for code, (wrong, then) in WRONG_SETTINGS.items():
        project.write(f"{code}.csv", "UA,1")
        printed = project.fails("tidegate run flights", code, **wrong)
        if code == "SETTINGS_INVALID":
            project.follow(code, "where the message says")
            assert f"environment {''.join(wrong)}" in printed
        project.follow(code, "tidegate settings", **(wrong if code == "ACCESS_REFUSED" else {}))
        assert code == "SETTINGS_INVALID" or [
            line for line in project.printed.splitlines() if set(wrong) & set(line.split())
        ], project.printed
        project.follow(code, then)
        project.type("tidegate run flights")
        assert project.state() == project.clean()


def test_the_advice_that_was_followed(followed: Followed, pytestconfig: pytest.Config) -> None:
    """Is counted, and the others are named."""
    part, report = followed.report()
    pytestconfig.stash[ADVICE] = report
    assert part
