"""Plan, process and commit may be repeated, interrupted or late, and follow each other in runs without Airflow."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests import steps
from tests.acceptance.conftest import SALES as DECLARED
from tests.acceptance.conftest import clean_state, stored_state, write_sales
from tests.integration.conftest import holding
from tests.sources.in_process import meanwhile
from tests.statements import execute
from tests.store import Commit
from tidegate.jobs.engine.processing import Done, Processed
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import RangeRefused, SchemaOutOfDate, SparkUnavailable, UnknownBatch, UnknownPipeline

SALES = replace(DECLARED, name="inbox")  # of this name, so that all tests share one Spark session


@pytest.fixture(autouse=True)
def sales(settings: Settings, register: Callable[..., None]) -> None:
    register(SALES)
    write_sales(settings.home, "01", "02", "03", "04")


def phase_of(settings: Settings, txid: int) -> str:
    return steps.history(settings, txid).status.phase


def process(settings: Settings, txid: int, **more: Any) -> Processed:
    return steps.process(settings, SALES, txid, owner="test", **more)


def commit(settings: Settings, txid: int) -> Commit:
    return steps.commit(settings, SALES, txid, owner="test")


RANGES: list[tuple[dict[str, int], str]] = [
    ({"from_txid": 3, "to_txid": 2}, "upside down"),
    ({"from_txid": 3}, "cannot start at txid 3: txids 1 to 2 would be left out"),
    ({"from_txid": 2, "to_txid": 2}, "cannot start at txid 2: txid 1 would be left out"),
    ({"from_txid": 0}, "from_txid is 0"),
    ({"to_txid": -1}, "to_txid is -1"),
    ({"max_batches": 0}, "max_batches is 0"),
]


@pytest.mark.promise("error:RANGE_REFUSED", "error:UNKNOWN_PIPELINE")
def test_a_range_pipeline_or_batch_that_cannot_be_is_refused_at_once(settings: Settings, store: StateStore) -> None:
    for arguments, message in RANGES:
        with pytest.raises(RangeRefused, match=message):
            steps.plan(settings, SALES, run_id="run", **arguments)
    with pytest.raises(UnknownPipeline, match="There is no pipeline sale"):
        steps.plan(settings, "sale", run_id="run")
    with pytest.raises(SchemaOutOfDate, match="Pipeline other is not registered"):
        steps.plan(settings, replace(SALES, name="other"), run_id="run")
    with pytest.raises(UnknownBatch, match="inbox has no txid 7"):
        process(settings, 7)
    assert store.last_opened("inbox") is None


@pytest.mark.promise("error:SPARK_UNAVAILABLE")
def test_steps_may_be_repeated(settings: Settings) -> None:
    """No new attempt while the newest is sealed, none after the commit; a commit alone processes first."""
    steps.plan(settings, SALES, run_id="run")
    with pytest.raises(SparkUnavailable, match=r"Nothing answers at 127\.0\.0\.1:1"):
        steps.process(replace(settings, spark_remote="sc://127.0.0.1:1"), SALES, 1, owner="test")
    assert phase_of(settings, 1) == "failed"
    assert str(process(settings, 1)) == "inbox 1:2 processed"
    assert str(process(settings, 1)) == "inbox 1 processed already"
    first = commit(settings, 1)
    assert str(process(settings, 1)) == "inbox 1:2 committed already"
    assert (first.attempt, first.already_committed) == (2, False)
    assert commit(settings, 1) == replace(first, already_committed=True)
    assert commit(settings, 2).attempt == 1
    assert stored_state(settings, SALES) == clean_state(settings.home)


@pytest.mark.promise("decision:0005")
@pytest.mark.usefixtures("counted_here")
def test_the_task_that_seals_the_next_batch_commits_what_is_ready(settings: Settings, store: StateStore) -> None:
    """With the sealed batches after it; batches after a gap wait. It does not wait for another task that is committing."""
    write_sales(settings.home, "05", "06")
    assert steps.plan(settings, SALES, run_id="first") == [1, 2, 3]
    with holding(settings, "SELECT FROM tidegate.cursor FOR UPDATE"):
        assert process(settings, 1, commit_ready=True).outcome is Done.SEALED
    process(settings, 3, commit_ready=True)
    assert [phase_of(settings, txid) for txid in (1, 2, 3)] == ["committed", "planned", "processed"]
    with meanwhile(StateStore, "turn", lambda: store.commit_batch(SALES.spec, 2, "another process")):
        process(settings, 2, commit_ready=True)
    assert [phase_of(settings, txid) for txid in (1, 2, 3)] == ["committed"] * 3
    assert [commit(settings, txid).already_committed for txid in (1, 2, 3)] == [True] * 3
    assert stored_state(settings, SALES) == clean_state(settings.home)


@pytest.mark.promise("fault:staging-is-lost-or-damaged:commit")
@pytest.mark.usefixtures("counted_here")
def test_lost_or_damaged_staging_is_staged_again(settings: Settings) -> None:
    steps.plan(settings, SALES, run_id="run")
    for txid in (1, 2):
        process(settings, txid)
    columns = "shop, sold, cents, least, most, task_attempt"
    damage = f"INSERT INTO staging.per_shop_2_1 ({columns}) VALUES ('north', 99, 99, 0, 999, 1000000000000)"
    execute(settings.conninfo(), f"DROP TABLE staging.per_shop_1_1; {damage}")
    assert commit(settings, 1).attempt == 2
    assert commit(settings, 2).attempt == 1
    assert stored_state(settings, SALES) == clean_state(settings.home)
