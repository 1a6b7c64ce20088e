"""Plan, process and commit may be repeated, interrupted or late; the state is that of a clean run."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import sqlalchemy as sa
from sqlalchemy.schema import DropTable

from tests import steps
from tests.acceptance.conftest import SALES, clean_state, run_once, sales, stored_state, write_sales
from tidegate.jobs import Pipeline
from tidegate.jobs.engine.processing import Processed
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import (
    AttemptNotSealed,
    CommitOutOfOrder,
    DeclarationChanged,
    MalformedRecord,
    RangeRefused,
    SchemaOutOfDate,
    SourceChanged,
    SparkUnavailable,
    UnknownBatch,
    UnknownPipeline,
)
from tidegate.state_store.ledger import tables
from tidegate.state_store.states import state_tables

__all__ = ["sales"]  # a fixture


def phase_of(settings: Settings, txid: int) -> str:
    """Return the phase that the ledger shows for a batch of sales."""
    with StateStore.connect(settings) as store:
        return store.batch_history("sales", txid).status.phase


def process(settings: Settings, txid: int) -> Processed:
    """Process one batch of sales."""
    return steps.process(settings, SALES, txid, owner="test")


def commit(settings: Settings, txid: int):
    """Commit one batch of sales."""
    return steps.commit(settings, SALES, txid, owner="test")


# ------------------------------------------------------------------------------------------------------------- plan


def test_a_second_run_spends_no_txid(settings: Settings, sales: Pipeline) -> None:
    """With nothing new at the source there is nothing to do, and nothing changes."""
    assert run_once(settings, "first") == [1, 2]
    state = stored_state(settings)

    assert run_once(settings, "second") == []
    with StateStore.connect(settings) as store:
        assert store.last_opened("sales").txid == store.committed("sales") == 2
    assert stored_state(settings) == state == clean_state(settings.home)


def test_only_added_files_are_read(settings: Settings, sales: Pipeline) -> None:
    """The next run's batches hold the new files and no others."""
    run_once(settings, "first")
    write_sales(settings.home, "05")

    assert run_once(settings, "second") == [3]
    with StateStore.connect(settings) as store:
        history = store.batch_history("sales", 3)
    assert [file["name"] for file in history.source_metadata["files"]] == ["05.csv"]
    assert history.status.source_rows == 4
    assert stored_state(settings) == clean_state(settings.home)


def test_the_same_run_always_gets_the_same_plan(settings: Settings, sales: Pipeline) -> None:
    """A repeated plan gets its first answer, even if files came meanwhile; another run gets left-over and new batches."""
    assert steps.plan(settings, SALES, run_id="first") == [1, 2]
    write_sales(settings.home, "05", "06")

    assert steps.plan(settings, SALES, run_id="first") == [1, 2]
    assert steps.plan(settings, SALES, run_id="second") == [1, 2, 3]
    assert steps.plan(settings, SALES, run_id="second") == [1, 2, 3]


def test_max_batches_counts_left_over_batches_first(settings: Settings, sales: Pipeline) -> None:
    """A run takes no more than `max_batches`, oldest first, and opens no batch that it does not take."""
    assert steps.plan(settings, SALES, run_id="one", max_batches=1) == [1]
    assert steps.plan(settings, SALES, run_id="again", max_batches=1) == [1]
    with StateStore.connect(settings) as store:
        assert store.last_opened("sales").txid == 1
    assert steps.plan(settings, SALES, run_id="both", max_batches=2) == [1, 2]


def test_a_range_covers_its_uncommitted_txids(settings: Settings, sales: Pipeline) -> None:
    """Committed batches are left alone, and a range may end beyond the source's data."""
    write_sales(settings.home, "05", "06")
    process_and_commit = steps.plan(settings, SALES, run_id="first", to_txid=1)
    assert process_and_commit == [1]
    process(settings, 1)
    commit(settings, 1)

    assert steps.plan(settings, SALES, run_id="a", from_txid=1, to_txid=2) == [2]
    assert steps.plan(settings, SALES, run_id="b", from_txid=2, to_txid=9) == [2, 3]
    assert steps.plan(settings, SALES, run_id="c", from_txid=1, to_txid=1) == []


@pytest.mark.promise("error:RANGE_REFUSED")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"from_txid": 3, "to_txid": 2}, "upside down"),
        ({"from_txid": 3}, "cannot start at txid 3: txids 1 to 2 would be left out"),
        ({"from_txid": 2, "to_txid": 2}, "cannot start at txid 2: txid 1 would be left out"),
        ({"from_txid": 0}, "from_txid is 0"),
        ({"to_txid": -1}, "to_txid is -1"),
        ({"max_batches": 0}, "max_batches is 0"),
    ],
)
def test_a_range_that_cannot_be_is_refused_before_anything_is_opened(
    settings: Settings, sales: Pipeline, arguments: dict[str, int], message: str
) -> None:
    """Upside down, or with a gap before it, which is named: no txid is spent."""
    with pytest.raises(RangeRefused, match=message):
        steps.plan(settings, SALES, run_id="run", **arguments)
    with StateStore.connect(settings) as store:
        assert store.last_opened("sales") is None
        assert store.run_txids("sales", "run") == []


# ---------------------------------------------------------------------------------------------------------- process


def test_processing_again_keeps_the_work_that_is_there(settings: Settings, sales: Pipeline) -> None:
    """Repeating a step finds its work done: no new attempt while the newest is sealed, none after the commit."""
    steps.plan(settings, SALES, run_id="run")
    assert str(process(settings, 1)) == "sales 1:1 processed"
    assert str(process(settings, 1)) == "sales 1 processed already"
    first = commit(settings, 1)
    assert str(process(settings, 1)) == "sales 1:1 committed already"
    again = commit(settings, 1)

    assert (first.already_committed, again.already_committed) == (False, True)
    assert (again.attempt, again.key_count, again.committed_at) == (1, first.key_count, first.committed_at)


def test_a_halted_batch_says_why_and_holds_up_only_later_commits(settings: Settings, sales: Pipeline) -> None:
    """Later batches are processed all the same and commit after the bad one: in order, and with nothing lost."""
    bad = settings.home / "sales" / "01.csv"
    planned = bad.read_bytes()
    steps.plan(settings, SALES, run_id="first")
    bad.write_bytes(planned.replace(b"10", b"11", 1))

    with pytest.raises(SourceChanged, match=str(bad)):
        process(settings, 1)
    process(settings, 2)
    with pytest.raises(CommitOutOfOrder, match="sales cannot commit txid 2: 0 is the last committed"):
        commit(settings, 2)
    assert (phase_of(settings, 1), phase_of(settings, 2)) == ("halted", "processed")
    with StateStore.connect(settings) as store:
        (lag,) = store.lag(["sales"])
        assert (lag.committed, lag.opened, lag.pending) == (0, 2, 2)
        assert str(bad) in (lag.waits_for or "")
    assert stored_state(settings) == {}

    bad.write_bytes(planned)
    assert run_once(settings, "second") == [1, 2]
    assert stored_state(settings) == clean_state(settings.home)


def test_committing_a_batch_that_cannot_be_processed_says_why(settings: Settings, sales: Pipeline) -> None:
    """A commit repeats a failed attempt; if that fails permanently, the commit reports the reason; every attempt is kept."""
    (settings.home / "sales" / "01.csv").write_text("shop,cents\nnorth\n")
    steps.plan(settings, SALES, run_id="run")
    with pytest.raises(MalformedRecord):
        process(settings, 1)

    with pytest.raises(MalformedRecord, match=r"01\.csv, line 2"):
        commit(settings, 1)
    with StateStore.connect(settings) as store:
        history = store.batch_history("sales", 1)
    assert history.status.phase == "halted"
    assert [attempt["error"].startswith("MALFORMED_RECORD") for attempt in history.attempts] == [True, True]


@pytest.mark.promise("error:SPARK_UNAVAILABLE")
def test_an_unreachable_spark_is_tried_again_not_halted(settings: Settings, sales: Pipeline) -> None:
    """If Spark is away, the error is retryable, the batch is not halted, and the next try succeeds."""
    steps.plan(settings, SALES, run_id="run")
    away = replace(settings, spark_remote="sc://127.0.0.1:1")

    with pytest.raises(SparkUnavailable, match=r"Nothing answers at 127\.0\.0\.1:1"):
        process(away, 1)
    assert phase_of(settings, 1) == "failed"
    assert str(process(settings, 1)) == "sales 1:2 processed"


@pytest.mark.promise("fault:declaration-changed-in-between:processing")
def test_another_declaration_than_the_registered_one_computes_nothing(settings: Settings, sales: Pipeline) -> None:
    """Partials of a changed pipeline never meet the old state: it has to be registered first."""
    steps.plan(settings, SALES, run_id="run")
    changed = replace(SALES, version=2)

    with pytest.raises(DeclarationChanged, match="tidegate migrate"):
        steps.process(settings, changed, 1, owner="test")
    with StateStore.connect(settings) as store:
        assert store.batch_history("sales", 1).attempts == []


def test_what_another_declaration_has_planned_never_counts(settings: Settings, sales: Pipeline) -> None:
    """Code ran before it was registered, and is taken back: the registered pipeline must not read what that has planned."""
    assert run_once(settings, "first") == [1, 2]
    (settings.home / "sales" / "draft.txt").write_text("shop,cents\nnorth,1000\n")
    changed = replace(SALES, source=replace(SALES.source, glob="*.txt"), version=2)

    with pytest.raises(DeclarationChanged, match="tidegate migrate"):
        steps.plan(settings, changed, run_id="another")
    with StateStore.connect(settings) as store:
        assert store.last_opened("sales").txid == 2
    write_sales(settings.home, "05")
    assert run_once(settings, "taken back") == [3]
    assert stored_state(settings) == clean_state(settings.home)


def test_a_new_version_processes_batches_of_an_old_one_again(
    settings: Settings, sales: Pipeline, register: Callable[..., None]
) -> None:
    """Uncommitted work of an older version never counts (I16)."""
    steps.plan(settings, SALES, run_id="run")
    process(settings, 1)
    doubled = replace(SALES, version=2, transform=lambda rows: rows.selectExpr("shop", "2 * cents AS cents"))
    register(doubled)

    done = steps.commit(settings, doubled, 1, owner="test")
    assert done.attempt == 2
    assert stored_state(settings)["north"] == (2, 2 * (10 + 20), 20, 40)


@pytest.mark.promise("error:UNKNOWN_PIPELINE")
def test_a_missing_pipeline_or_batch_is_named(settings: Settings, sales: Pipeline) -> None:
    """A pipeline that is not declared or not registered, and a batch that is not planned."""
    with pytest.raises(UnknownPipeline, match="There is no pipeline sale"):
        steps.plan(settings, "sale", run_id="run")
    with pytest.raises(SchemaOutOfDate, match="Pipeline other is not registered"):
        steps.plan(settings, replace(SALES, name="other"), run_id="run")
    with pytest.raises(UnknownBatch, match="sales has no txid 7"):
        process(settings, 7)


@pytest.mark.promise("decision:0005")
def test_the_task_that_seals_the_next_batch_commits_it(settings: Settings, sales: Pipeline) -> None:
    """Together with the sealed batches after it; batches after a gap wait. The batches' own commits then find it done."""
    assert steps.plan(settings, SALES, run_id="first") == [1, 2]

    steps.process(settings, SALES, 2, owner="test", commit_ready=True)
    assert phase_of(settings, 2) == "processed"
    steps.process(settings, SALES, 1, owner="test", commit_ready=True)

    assert [phase_of(settings, txid) for txid in (1, 2)] == ["committed", "committed"]
    assert [commit(settings, txid).already_committed for txid in (1, 2)] == [True, True]
    assert stored_state(settings) == clean_state(settings.home)


@pytest.mark.promise("decision:0005")
def test_a_commit_by_another_process_does_not_stop_this_one(
    settings: Settings, sales: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sealed batches after it are committed all the same."""
    steps.plan(settings, SALES, run_id="first")
    process(settings, 2)
    real = StateStore.committed

    def committed(store: StateStore, pipeline: str) -> int:
        before = real(store, pipeline)
        store.commit_batch(SALES.spec, 1, "another process")
        return before

    monkeypatch.setattr(StateStore, "committed", committed)
    steps.process(settings, SALES, 1, owner="test", commit_ready=True)

    assert [phase_of(settings, txid) for txid in (1, 2)] == ["committed", "committed"]


def test_processing_leaves_the_commit_to_the_committing_process(settings: Settings, sales: Pipeline) -> None:
    """It does not wait for the lock, and does its own work all the same."""
    steps.plan(settings, SALES, run_id="first")
    with StateStore.connect(settings) as other, other.engine.begin() as connection:
        connection.execute(sa.select(tables.cursor).with_for_update())
        processed = steps.process(settings, SALES, 1, owner="test", commit_ready=True)
        assert processed.outcome == "processed"

    assert phase_of(settings, 1) == "processed"
    assert not commit(settings, 1).already_committed


# ----------------------------------------------------------------------------------------------------------- commit


def test_a_commit_includes_the_sealed_batches_after_it(settings: Settings, sales: Pipeline) -> None:
    """They commit in order, and their own commits find them committed."""
    steps.plan(settings, SALES, run_id="run")
    process(settings, 2)
    with pytest.raises(CommitOutOfOrder):
        commit(settings, 2)
    process(settings, 1)

    assert commit(settings, 1).already_committed is False
    assert phase_of(settings, 2) == "committed"
    assert commit(settings, 2).already_committed is True
    assert stored_state(settings) == clean_state(settings.home)


def test_a_commit_without_processing_processes_first(settings: Settings, sales: Pipeline) -> None:
    """A failure in either phase repeats both, so a commit alone is enough."""
    steps.plan(settings, SALES, run_id="run")

    assert commit(settings, 1).attempt == 1
    assert commit(settings, 2).attempt == 1
    assert stored_state(settings) == clean_state(settings.home)


def test_a_commit_does_not_touch_an_attempt_that_is_at_work(settings: Settings, sales: Pipeline, as_owner: Callable) -> None:
    """The commit is retried later; once the attempt is overdue, a new attempt at the batch fences it."""
    steps.plan(settings, SALES, run_id="run")
    with StateStore.connect(settings) as store:
        store.start_attempt(SALES.spec, 1, "a slow one")
    with pytest.raises(AttemptNotSealed, match=r"sales 1:1 is still processing \(a slow one"):
        commit(settings, 1)
    with StateStore.connect(settings) as store:
        assert len(store.batch_history("sales", 1).attempts) == 1

    as_owner(sa.update(tables.attempt).values(started_at=sa.func.now() - sa.text("interval '3601 s'")))
    assert commit(settings, 1).attempt == 2


def staging(txid: int, attempt: int) -> sa.Table:
    """Return the staging table of one attempt at a batch of sales."""
    return state_tables.staging_table_of(SALES.spec.states[0], txid, attempt)


def meddle(settings: Settings, statement: sa.Executable) -> None:
    """Run one statement as the role that owns the staging tables."""
    with StateStore.connect(settings) as store, store.engine.begin() as connection:
        connection.execute(statement)


def one_row_less(table: sa.Table) -> sa.Executable:
    """Delete one staged row."""
    return sa.delete(table).where(table.c.shop == "north")


def another_value(table: sa.Table) -> sa.Executable:
    """Change one staged value; the number of rows stays."""
    return sa.update(table).where(table.c.shop == "north").values(cents=0)


@pytest.mark.promise("fault:staging-is-lost-or-damaged:commit")
@pytest.mark.parametrize(
    "damage", [DropTable, sa.delete, one_row_less, another_value], ids=["dropped", "emptied", "a row less", "a value"]
)
def test_lost_or_damaged_staging_is_staged_again(
    settings: Settings, sales: Pipeline, damage: Callable[[sa.Table], sa.Executable]
) -> None:
    """If staging is not as it was sealed, the commit stages again from the saved metadata, in a new attempt."""
    steps.plan(settings, SALES, run_id="run")
    process(settings, 1)
    meddle(settings, damage(staging(1, 1)))

    assert commit(settings, 1).attempt == 2
    commit(settings, 2)
    assert stored_state(settings) == clean_state(settings.home)


def test_a_zombie_that_stages_more_rows_later_changes_nothing(settings: Settings, sales: Pipeline) -> None:
    """Rows that no seal covers do not count, even in the right table (I7)."""
    steps.plan(settings, SALES, run_id="run")
    process(settings, 1)
    row = {"shop": "north", "sold": 99, "cents": 99, "least": 0, "most": 999, "task_attempt": 2**40}
    meddle(settings, sa.insert(staging(1, 1)).values(row))

    assert commit(settings, 1).attempt == 1
    commit(settings, 2)
    assert stored_state(settings) == clean_state(settings.home)
