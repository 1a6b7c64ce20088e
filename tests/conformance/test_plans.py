"""A plan that fails is shown to operators until another succeeds, however it fails, beside others, and if its process dies."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import sqlalchemy as sa

from tests import steps
from tests.conformance.conftest import Stream
from tests.store import errors, registration, tables
from tidegate import migrations
from tidegate.jobs import Count, Pipeline, State
from tidegate.jobs.sources import Coordinator
from tidegate.state_store import Settings

Ask = Callable[[int], dict[str, Any] | None] | BaseException
NOT_THERE = errors.SourceUnreadable("The folder is not there.")


@dataclass(frozen=True)
class Asked(Stream, Coordinator):
    """A source that returns or raises what a test says; its declaration is the same whatever that is."""

    ask: Ask = field(default=lambda _: None, compare=False)

    def coordinator(self, settings: Settings) -> Coordinator:  # noqa: ARG002
        return self

    def initialize_transaction(self, txid: int, previous: Any, current: Any) -> Any:  # noqa: ARG002
        if isinstance(self.ask, BaseException):
            raise self.ask
        return self.ask(txid)


ASKED = Pipeline(name="asked", source=Asked("transactional"), states={"seen": State(aggregates={"rows": Count()})})


def asking(ask: Ask) -> Pipeline:
    return replace(ASKED, source=Asked("transactional", ask=ask))


def up_to(last: int) -> Pipeline:
    return asking(lambda txid: {"n": txid} if txid <= last else None)


@pytest.fixture(autouse=True)
def asked(register: Callable[..., None]) -> None:
    register(ASKED)


def row(settings: Settings) -> Any:
    with migrations.connected(settings) as connection:
        return connection.execute(sa.select(tables.plan).where(tables.plan.c.pipeline == "asked")).one()


def fail(settings: Settings, pipeline: Pipeline, run_id: str = "run", error: Any = errors.SourceUnreadable) -> None:
    with pytest.raises(error):
        steps.plan(settings, pipeline, run_id=run_id)


@pytest.mark.promise("decision:0047")
def test_the_first_of_a_row_of_failures_dates_it_and_the_newest_says_why(settings: Settings) -> None:
    cannot_be_stored = errors.SourceUnavailable("It is away: \0 and \udcff")
    fail(settings, asking(cannot_be_stored), "first", errors.SourceUnavailable)
    first = row(settings)
    assert (first.failed, first.failed_run, first.error) == (1, "first", "SOURCE_UNAVAILABLE: It is away: \\0 and \\udcff")
    assert first.failing_since == first.failed_at
    fail(settings, asking(NOT_THERE), "second")
    fail(settings, asking(NOT_THERE), "second")  # Airflow's next try
    newest = row(settings)
    assert (newest.failed, newest.failed_run, newest.error) == (3, "second", "SOURCE_UNREADABLE: The folder is not there.")
    assert newest.failing_since == first.failing_since < newest.failed_at
    assert steps.plan(settings, ASKED, run_id="third") == []
    assert row(settings)[3:] == (0, None, None, None, None)
    assert row(settings).succeeded == 1


def test_a_declaration_that_is_not_registered_fails_where_there_is_something_new(settings: Settings) -> None:
    """And a pipeline that is not registered at all has no row, nor any place where it would be shown."""
    changed = replace(up_to(1), version=2)
    fail(settings, changed, error=errors.DeclarationChanged)
    assert row(settings).error.startswith("DECLARATION_CHANGED: ")
    with migrations.connected(settings) as connection:
        registration.register(connection, changed.spec)
    assert row(settings).failed == 1  # that is for the next plan to say
    assert steps.plan(settings, changed, run_id="run") == [1]
    assert row(settings).failed == 0
    fail(settings, replace(ASKED, name="another"), error=errors.SchemaOutOfDate)


def test_a_plan_that_has_not_asked_the_source_proves_nothing(settings: Settings) -> None:
    assert steps.plan(settings, up_to(2), run_id="one") == [1, 2]
    failing = asking(NOT_THERE)
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
    def fail_later(_txid: int) -> None:
        assert steps.plan(settings, up_to(new), run_id="newer") == list(range(1, new + 1))
        raise NOT_THERE

    fail(settings, asking(fail_later), "older")
    assert row(settings).failed == 0
    fail(settings, asking(NOT_THERE), "later")
    assert (row(settings).failed, row(settings).failed_run) == (1, "later")
