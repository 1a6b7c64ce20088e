"""Columns that states get and lose in place, beside batches of the former declaration."""

import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.conformance.conftest import Flow, Stream
from tests.integration.conftest import contents, until
from tests.sources.in_process import meanwhile
from tests.store import PipelineSpec, project, range_partitions
from tidegate import migrations
from tidegate.jobs import History, Newest, Pipeline, Ranges, Rows
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import DeclarationChanged, Unprocessed

GONE = {"cents": "bigint"}
BASE = {**GONE, "note": "text"}
COME = {**BASE, "city": "text"}
COLUMNS = ("shop", "at", *COME)
SHAPE = """
SELECT attrelid::regclass, attname, format_type(atttypid, atttypmod), attnotnull, attisdropped
FROM pg_attribute JOIN pg_class c ON c.oid = attrelid WHERE relnamespace = 'state'::regnamespace ORDER BY attrelid, attnum
"""
OLD, LATER = ("b", 1, 4, "z", "Bern"), ("c", 9, 5, "z", "Bern")


def declare(columns: dict[str, str], *, version: int = 1) -> Pipeline:
    """Declare a pipeline with each kind of state that keeps rows as they came, with these value columns."""
    opaque: dict[str, Any] = {"kind": "opaque", "changes": True}
    states = {
        "log": Rows({"shop": "text", "at": "bigint", **columns}, range_partitions=Ranges("at", 4)),
        "newest": Newest({"shop": "text"}, columns=columns, order_by={"at": "bigint"}, **opaque),
        "versions": History({"shop": "text"}, columns=columns, order_by={"at": "bigint"}, **opaque),
    }
    return Pipeline("shop", Stream("opaque"), states, version=version)


class Shop(Flow):
    def prepare(self, *lines: tuple[Any, ...], txid: int | None = None) -> int:
        """Seal an attempt at a batch with those columns of lines that the states have; return its txid."""
        txid = txid or self.next()
        columns = [value.name for value in self.spec.states[0].values]
        rows = [line[: len(columns)] for line in lines]
        self.put(txid, log=[(place, *row) for place, row in enumerate(rows)], newest=rows, versions=rows)
        return txid

    def shown(self, state: str) -> list[tuple[Any, ...]]:
        return sorted((tuple(row.get(name) for name in COLUMNS) for row in self.rows(state)), key=repr)


@pytest.fixture
def shop(settings: Settings, store: StateStore, owner: StateStore, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """A pipeline whose migrations a test writes and runs, with three lines in two batches."""
    for folder in ("pipelines", "migrations"):
        (settings.home / folder).mkdir()
    monkeypatch.setenv(project.HOME_VARIABLE, str(settings.home))
    migrate(settings, spec := declare(BASE).spec)
    monkeypatch.setattr(range_partitions, "TXIDS", 1)
    flow = Shop(store, owner, spec)
    flow.commit(flow.prepare(("a", 1, 1, "x"), ("b", 2, 2, None)))
    flow.commit(flow.prepare(("a", 5, 3, "y")))
    return flow


def migrate(settings: Settings, spec: PipelineSpec) -> None:
    migrations.new_revision(settings, [spec], "columns")
    migrations.upgrade(settings, [spec])


@pytest.mark.promise("decision:0051")
def test_a_column_comes_without_a_value_in_rows_from_before(shop: Shop, settings: Settings) -> None:
    sealed, old = shop.prepare(OLD, LATER), shop.spec
    shop.spec = declare(COME, version=2).spec
    migrate(settings, shop.spec)
    assert migrations.new_revision(settings, [shop.spec], "nothing") is None
    assert shop.shown("newest") == [("a", 5, 3, "y", None), ("b", 2, 2, None, None)]
    with pytest.raises(DeclarationChanged, match="this code's declaration is not the registered one"):
        shop.store.commit_batch(old, sealed, "old code")
    with pytest.raises(Unprocessed, match="computed by another declaration"):
        shop.commit(sealed)
    assert shop.store.commit_ready(shop.spec, "test") == []
    shop.commit(shop.prepare(OLD, LATER, txid=sealed))
    a_1, a_5 = ("a", 1, 1, "x", "Rome"), ("a", 5, 3, "y", "Oslo")
    for line in (a_1, a_5):  # the same lines again, with their city
        shop.commit(shop.prepare(line))
    b_2, before = ("b", 2, 2, None, None), [("a", 1, 1, "x", None), ("a", 5, 3, "y", None)]
    assert shop.shown("newest") == [a_5, b_2, LATER]
    assert shop.shown("versions") == [a_1, a_5, OLD, b_2, LATER]
    assert shop.shown("log") == sorted([*before, b_2, OLD, LATER, a_1, a_5], key=repr)
    recorded = {change["shop"]: change["city"] for change in shop.store.changes(shop.spec.states[1])}
    assert recorded == {"a": "Oslo", "b": None, "c": "Bern"}


@pytest.mark.promise("decision:0051")
def test_old_code_commits_nothing_during_the_migration(shop: Shop, settings: Settings, waiting: Callable[[], int]) -> None:
    sealed, spec = shop.prepare(OLD), declare(COME, version=2).spec
    migrations.new_revision(settings, [spec], "columns")
    commits: list[Future[Any]] = []
    with ThreadPoolExecutor(1) as thread:

        def begin_commit() -> None:
            commits.append(thread.submit(shop.commit, sealed))
            until(waiting)

        with meanwhile(migrations.registration, "register", begin_commit):
            migrations.upgrade(settings, [spec])
        with pytest.raises(DeclarationChanged):
            commits[0].result(60)
    shop.spec = spec
    shop.commit(shop.prepare(OLD, txid=sealed))
    assert OLD in shop.shown("versions")


def test_no_migration_leaves_a_registered_pipeline_without_its_column(shop: Shop, settings: Settings) -> None:
    def found() -> Any:
        return contents(settings), shop.by_hand(SHAPE)

    gone, before = declare(GONE, version=2).spec, found()
    migrations.new_revision(settings, [gone], "columns")
    again = declare({**GONE, "city": "text"}, version=2).spec
    for spec in (gone, again):
        written = migrations.new_revision(settings, [spec], "another")
        assert (written is None) == (spec is gone)
        assert found() == before
    written.unlink()
    unconfirmed, refusal = [replace(gone, version=1)], r"loses note.*raise the pipeline's version above 1"
    with pytest.raises(DeclarationChanged, match=refusal):
        migrations.upgrade(settings, unconfirmed)
    (why,) = migrations.upgrade_all_but_broken(settings, unconfirmed).values()
    assert re.search(refusal, why)
    assert found() == before
    assert migrations.upgrade_all_but_broken(settings, [gone]) == {}
