"""A plan that fails is shown to operators until another succeeds, however it fails, beside others, and if its process dies."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import sqlalchemy as sa

from tests import steps
from tests.conformance.conftest import Stream
from tests.store import Lag, registration, tables
from tidegate import migrations
from tidegate.jobs import Count, Pipeline, State
from tidegate.jobs.sources import Coordinator
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import (
    DeclarationChanged,
    RangeExpired,
    SchemaOutOfDate,
    SourceUnavailable,
    SourceUnreadable,
)

Ask = Callable[[int], dict[str, Any] | None]
NOT_THERE = SourceUnreadable("The folder is not there.")


@dataclass(frozen=True)
class Asked(Stream, Coordinator):
    """A source that does what a test says when it is asked for a batch."""

    ask: Ask = field(default=lambda _: None, compare=False)

    def coordinator(self, settings: Settings) -> Coordinator:
        del settings
        return self

    def initialize_transaction(self, txid: int, previous: Any, current: Any) -> dict[str, Any] | None:
        del previous, current
        return self.ask(txid)


ASKED = Pipeline(name="asked", source=Asked("transactional"), states={"seen": State(aggregates={"rows": Count()})})


def asking(ask: Ask) -> Pipeline:
    """Return the pipeline with another behaviour of its source; its declaration is the same."""
    return replace(ASKED, source=Asked("transactional", ask=ask))


def raising(error: BaseException) -> Pipeline:
    def ask(_txid: int) -> None:
        raise error

    return asking(ask)


def up_to(last: int) -> Pipeline:
    return asking(lambda txid: {"n": txid} if txid <= last else None)


@pytest.fixture(autouse=True)
def asked(register: Callable[..., None]) -> None:
    register(ASKED)


def status(settings: Settings) -> Lag:
    with StateStore.connect(settings) as store:
        (lag,) = store.lag(["asked"])
        return lag


def row(settings: Settings) -> Any:
    with migrations.connected(settings) as connection:
        return connection.execute(sa.select(tables.plan).where(tables.plan.c.pipeline == "asked")).one()


def fail(settings: Settings, pipeline: Pipeline, run_id: str = "run", error: type[BaseException] = SourceUnreadable) -> None:
    with pytest.raises(error):
        steps.plan(settings, pipeline, run_id=run_id)


@pytest.mark.promise("decision:0047")
def test_the_first_of_a_row_of_failures_dates_it_and_the_newest_says_why(settings: Settings) -> None:
    fail(settings, raising(SourceUnavailable("It is away.")), "first", SourceUnavailable)
    first = row(settings)
    assert (first.failed, first.failed_run, first.error) == (1, "first", "SOURCE_UNAVAILABLE: It is away.")
    assert first.failing_since == first.failed_at
    fail(settings, raising(NOT_THERE), "second")
    fail(settings, raising(NOT_THERE), "second")  # Airflow's next try
    newest = row(settings)
    assert (newest.failed, newest.failed_run, newest.error) == (3, "second", "SOURCE_UNREADABLE: The folder is not there.")
    assert newest.failing_since == first.failing_since < newest.failed_at
    assert steps.plan(settings, ASKED, run_id="third") == []
    assert row(settings)[3:] == (0, None, None, None, None)
    assert row(settings).succeeded == 1


def test_an_error_that_postgres_cannot_store_is_escaped(settings: Settings) -> None:
    fail(settings, raising(RangeExpired("a NUL \0 and \udcff")), error=RangeExpired)
    assert status(settings).plan_error == "RANGE_EXPIRED: a NUL \\0 and \\udcff"


def test_a_declaration_that_is_not_registered_fails_where_there_is_something_new(settings: Settings) -> None:
    """And a pipeline that is not registered at all has no row, nor any place where it would be shown."""
    changed = replace(up_to(1), version=2)
    fail(settings, changed, error=DeclarationChanged)
    assert (status(settings).plan_error or "").startswith("DECLARATION_CHANGED: ")
    with migrations.connected(settings) as connection:
        registration.register(connection, changed.spec)
    assert status(settings).failed_plans == 1  # that is for the next plan to say
    assert steps.plan(settings, changed, run_id="run") == [1]
    assert status(settings).failed_plans == 0
    fail(settings, replace(ASKED, name="another"), error=SchemaOutOfDate)


def test_a_plan_that_has_not_asked_the_source_proves_nothing(settings: Settings) -> None:
    assert steps.plan(settings, up_to(2), run_id="one") == [1, 2]
    failing = raising(NOT_THERE)
    fail(settings, failing, "two")
    assert steps.plan(settings, failing, run_id="one") == [1, 2]
    assert steps.plan(settings, failing, run_id="three", to_txid=2) == [1, 2]
    assert steps.plan(settings, failing, run_id="four", max_batches=2) == [1, 2]
    assert (row(settings).failed, row(settings).succeeded) == (1, 1)
    assert steps.plan(settings, ASKED, run_id="five") == [1, 2]
    assert (row(settings).failed, row(settings).succeeded) == (0, 2)


@pytest.mark.promise("decision:0047")
@pytest.mark.parametrize("new", [0, 2])
def test_an_older_plan_that_fails_does_not_hide_a_newer_success(settings: Settings, new: int) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def fail_later(_txid: int) -> None:
        asked.set()
        assert goes_on.wait(60)
        raise NOT_THERE

    with ThreadPoolExecutor(1) as pool:
        older = pool.submit(fail, settings, asking(fail_later), "older")
        try:
            assert asked.wait(60)
            assert steps.plan(settings, up_to(new), run_id="newer") == list(range(1, new + 1))
        finally:
            goes_on.set()
        older.result()
    assert row(settings).failed == 0
    fail(settings, raising(NOT_THERE), "later")
    assert (row(settings).failed, row(settings).failed_run) == (1, "later")
