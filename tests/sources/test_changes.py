"""Pipelines that follow the states of others: each change once, in txid order, from end to end."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from tests import steps
from tests.conftest import register_pipelines
from tests.sources.conftest import SCHEMA, Inbox
from tests.sources.in_process import stage_here
from tests.store import Redo, cursors, project, range_partitions, registration
from tidegate import migrations
from tidegate.jobs import Avg, Changes, Count, Files, FixedBatches, Inputs, Newest, Pipeline, Rows, State, Sum
from tidegate.jobs.engine.processing import Processor
from tidegate.jobs.engine.worker import Worker
from tidegate.jobs.sources import changes
from tidegate.jobs.sources.changes import removable
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import (
    DeclarationChanged,
    RangeRefused,
    SourceChanged,
    SourceUnreadable,
    StoreUnavailable,
    UsageError,
)

PER_NAME = State(
    key={"name": "text"},
    aggregates={"lines": Count(), "amount": Sum("amount"), "mean": Avg("amount")},
    kind="opaque",
    changes=True,
)
STATES = {
    "per_name": PER_NAME,
    "total": State(aggregates={"amount": Sum("amount")}, kind="opaque", changes=True),
    "log": Rows({"name": "text", "amount": "integer"}),
}


Here = Callable[[dict[str, list[dict[str, Any]]]], list[dict[str, Any]]]


def counted(rows: Any) -> Any:
    return rows.selectExpr(
        "name", "amount - coalesce(previous_amount, 0) AS more", "IF(previous_txid IS NULL, 1, NULL) AS is_new"
    )


def with_difference(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "more": row["amount"] - (row["previous_amount"] or 0), "is_new": None if row["previous_txid"] else 1}


def twin(in_process: Here) -> Callable[..., Any]:
    def transform(_rows: Any) -> Any:
        raise AssertionError

    transform.in_process = in_process  # type: ignore[attr-defined]
    return transform


@pytest.fixture(autouse=True)
def _counted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let batches be counted in this process, but for a transform that has no twin, and states that it cannot make."""
    by_spark = Processor._stage

    def stage(processor: Processor, attempt: Any) -> None:
        pipeline = processor._pipeline
        has_twin = pipeline.transform is None or hasattr(pipeline.transform, "in_process")
        is_simple = has_twin and all(isinstance(each, State | Rows) for each in pipeline.states.values())
        (stage_here if is_simple and not pipeline.spec.quarantines else by_spark)(processor, attempt)

    monkeypatch.setattr(Processor, "_stage", stage)


@pytest.fixture
def upstream(inbox: Inbox) -> Pipeline:
    """A pipeline over the inbox, a file a batch, whose states are followed."""
    return inbox.declare(Files("inbox", format="csv", schema=SCHEMA, header=False), states=STATES)


@pytest.fixture
def follow(register: Callable[..., None]) -> Callable[..., Pipeline]:
    """A function that declares and registers a pipeline that follows a state of the inbox."""

    def declare(state: str = "per_name", *, of: dict[str, int] | None = None, **pipeline: Any) -> Pipeline:
        states = {
            "followed": State(
                key={"name": "text"},
                aggregates={"changes": Count(), "amount": Sum("more"), "new": Count("is_new")},
                kind="opaque",
            )
        }
        transform = twin(lambda rows: [with_difference(row) for row in rows[""]])
        declared = Pipeline(
            "follower", Changes(f"inbox.{state}", **(of or {})), **{"states": states, "transform": transform, **pipeline}
        )
        register(declared)
        return declared

    return declare


def followed(inbox: Inbox, pipeline: Pipeline) -> dict[str, int]:
    return {row["name"]: row["amount"] for row in inbox.rows(pipeline, next(iter(pipeline.states)))}


def commit_files(inbox: Inbox, upstream: Pipeline, *contents: str, at: int = 0) -> None:
    for number, content in enumerate(contents, start=at):
        inbox.write(f"{number}.csv", content)
    inbox.run(upstream, f"run {at}")


FILES = ["a,1\nb,2\n", "a,3\n", "", "b,4\na,5\nc,6\n", "c,-6\n"]


@pytest.fixture(params=[1, range_partitions.TXIDS], ids=["partitions", "one partition"])
def divided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide what the inbox and its followers record into a partition for each txid, or do not."""
    monkeypatch.setattr(range_partitions, "TXIDS", request.param)


@pytest.mark.promise("decision:0029")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("limits", [{"max_rows": 2}, {"max_txids": 1}, {}], ids=["two rows", "txid by txid", "one range"])
@pytest.mark.usefixtures("divided")
def test_the_follower_has_each_change_once(inbox: Inbox, upstream: Pipeline, follow: Any, limits: dict[str, int]) -> None:
    follower = follow(of=limits, transform=counted)  # by Spark
    for number, content in enumerate(FILES):
        commit_files(inbox, upstream, content, at=number)
        if number in (1, 4):
            steps.run(inbox.settings, follower, f"run {number}")
    assert steps.run(inbox.settings, follower, "nothing new") == []
    assert followed(inbox, follower) == followed(inbox, upstream) == {"a": 9, "b": 6, "c": 0}
    assert {row["new"] for row in inbox.rows(follower, "followed")} == {1}


def test_rows_and_a_global_state_are_followed_too(
    inbox: Inbox, upstream: Pipeline, follow: Any, register: Callable[..., None]
) -> None:
    commit_files(inbox, upstream, *FILES[:3])
    follower = follow("log", transform=None, states={"again": Rows({"name": "text", "amount": "integer"})})
    steps.run(inbox.settings, follower, "run")
    assert sorted((row["name"], row["amount"]) for row in inbox.rows(follower, "again")) == [("a", 1), ("a", 3), ("b", 2)]
    history = {"steps": Rows({"amount": "bigint", "before": "bigint"})}
    before = twin(lambda rows: [{**row, "before": row["previous_amount"]} for row in rows[""]])
    of_total = Pipeline("of_total", Changes("inbox.total"), history, transform=before)
    register(of_total)
    steps.run(inbox.settings, of_total, "run")
    assert [(row["amount"], row["before"]) for row in inbox.rows(of_total, "steps")] == [(3, None), (6, 3), (6, 6)]


def test_a_txid_that_another_pipeline_follows_is_not_redone(inbox: Inbox, upstream: Pipeline, follow: Any) -> None:
    """It may have counted what would be taken back; without a follower, the changes are recorded again."""
    commit_files(inbox, upstream, FILES[0])
    steps.redo(inbox.settings, upstream, 1, owner="an operator", reason="it was wrong")
    with StateStore.connect(inbox.settings) as store:
        changed = [(c["txid"], c["name"], c["amount"]) for c in store.changes(upstream.spec.states[0])]
    assert changed == [(1, "a", 1), (1, "b", 2)]
    follow()
    with pytest.raises(RangeRefused, match=r"pipeline follower follows its state per_name, .* add --without follower\."):
        steps.redo(inbox.settings, upstream, 1, owner="an operator", reason="it was wrong")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("counted", ["committed", "sealed", "none"])
def test_a_redo_goes_without_a_follower_that_is_not_run_any_more(
    inbox: Inbox, upstream: Pipeline, follow: Any, counted: str
) -> None:
    follower = follow()
    commit_files(inbox, upstream, FILES[0])
    if counted != "none":
        (txid,) = steps.plan(inbox.settings, follower, run_id="first")
        steps.process(inbox.settings, follower, txid, owner="test")
    if counted == "committed":
        steps.commit(inbox.settings, follower, txid, owner="test")

    with Worker.open(inbox.settings, upstream, owner="an operator") as worker:
        with pytest.raises(UsageError, match="Pipeline another follows no state of inbox"):
            worker.redo(1, "it was wrong", without=("follower", "another"))
        worker.redo(1, "it was wrong", without=("follower",))
    assert steps.history(inbox.settings, 1).actions[-1]["reason"] == "it was wrong (without follower)"
    if counted == "none":
        steps.run(inbox.settings, follower, "second")
        assert followed(inbox, follower) == {"a": 1, "b": 2}
        return
    commit_files(inbox, upstream, FILES[1], at=1)
    with pytest.raises(SourceChanged, match=r"has made it again: .* or the txid was redone without this pipeline"):
        steps.run(inbox.settings, follower, "second")


def test_a_redo_and_a_follower_that_registers_wait_for_each_other(
    inbox: Inbox, upstream: Pipeline, follow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the redo knows each follower that may read what it takes back; other pipelines are registered meanwhile."""
    monkeypatch.setattr(migrations, "DDL_LOCK_TIMEOUT_SECONDS", 0.5)
    follower = Pipeline("follower", Changes("inbox.log"), {"copies": State({"name": "text"}, {"copies": Count()})})
    other = Pipeline("other", Files("other", format="csv", schema=SCHEMA), {"others": State(aggregates={"lines": Count()})})
    with StateStore.connect(inbox.settings) as store, store.engine.begin() as redoing:
        cursors.lock(redoing, "inbox")
        with pytest.raises(StoreUnavailable, match="lock"):
            register_pipelines(inbox.settings, follower)
        register_pipelines(inbox.settings, other)
    impatient = replace(inbox.settings, lock_timeout_seconds=1)
    with StateStore.connect(impatient, user=impatient.pg_owner) as store, migrations.connected(inbox.settings) as registering:
        registration.register(registering, follower.spec)
        with pytest.raises(StoreUnavailable, match="lock"):
            store.redo_batch(upstream.spec, 1, Redo("an operator", "it was wrong"))
    register_pipelines(inbox.settings, follower)


NEWEST = Newest({"name": "text"}, columns={"amount": "integer"}, order_by={"at": "integer"}, kind="opaque", changes=True)
LATER = replace(NEWEST, columns={"amount": "integer", "city": "text"})


def evolving(columns: dict[str, str], newest: Newest, version: int) -> dict[str, Pipeline]:
    """Declare pipelines, each with a followed state that gets and loses columns: appended rows, or the newest ones."""
    schema = {"name": "string", "amount": "int", "at": "int", "city": "string"}
    source = Files("inbox", format="csv", schema=schema, header=False)
    states = {"log": Rows(columns), "newest": newest}
    return {name: Pipeline("inbox", source, {name: state}, version=version) for name, state in states.items()}


BEFORE = evolving({"name": "text", "amount": "integer"}, NEWEST, 1)
AFTER = evolving({"name": "text", "amount": "integer", "city": "text"}, LATER, 2)
WITHOUT = evolving({"name": "text", "city": "text"}, replace(LATER, columns={"city": "text"}), 3)


@pytest.fixture
def evolve(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    for folder in ("pipelines", "migrations"):
        (inbox.settings.home / folder).mkdir()
    monkeypatch.setenv(project.HOME_VARIABLE, str(inbox.settings.home))

    def migrate(*pipelines: Pipeline) -> None:
        specs = [pipeline.spec for pipeline in pipelines]
        migrations.new_revision(inbox.settings, specs, "columns")
        migrations.upgrade(inbox.settings, specs)

    return migrate


def copied(name: str, state: str, version: int = 1, /, **columns: str) -> Pipeline:
    """Declare a follower that appends these columns of all rows that it reads, and their txid."""
    transform = twin(lambda rows: [{**row, "of_txid": row["txid"]} for row in rows[""]])
    states = {f"copy_of_{name}": Rows({"of_txid": "bigint", **columns})}
    return Pipeline(name, Changes(f"inbox.{state}"), states, transform, version=version)


def copies(inbox: Inbox, follower: Pipeline) -> list[tuple[Any, ...]]:
    names = [value.name for value in follower.spec.states[0].values]
    rows = [tuple(row[name] for name in names) for row in inbox.rows(follower, follower.spec.states[0].name)]
    return sorted(rows, key=repr)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("state", ["log", "newest"])
def test_columns_come_and_go_in_what_is_followed(inbox: Inbox, evolve: Callable[..., None], state: str) -> None:
    """One that comes is null in what is followed from before; one goes once followers have committed what has it."""
    kept = {"name": "text", "amount": "integer"}
    follower = copied("follower", state, **kept)
    evolve(BEFORE[state], follower)
    inbox.write("1.csv", "a,1,1,Bern\nb,2,2,Bern\n")
    inbox.run(BEFORE[state], "first")
    (first,) = steps.plan(inbox.settings, follower, run_id="first")
    steps.process(inbox.settings, follower, first, owner="test")

    # A batch that was planned before is the same again.
    evolve(AFTER[state], follower)
    steps.process(inbox.settings, follower, first, owner="test", mode="restage")
    attempts = steps.history(inbox.settings, first, "follower").attempts
    assert [each["attempt"] for each in attempts if each["sealed_at"]] == [1, 2]
    steps.commit(inbox.settings, follower, first, owner="test")
    inbox.write("2.csv", "a,3,3,Rome\n")
    inbox.run(AFTER[state], "second")
    late = copied("late", state, **kept, city="text")
    evolve(AFTER[state], follower, late)
    (both,) = steps.plan(inbox.settings, late, run_id="late")
    for mode in ("resume", "restage"):
        steps.process(inbox.settings, late, both, owner="test", mode=mode)
    refusal = rf"State {state} .* cannot lose or widen amount yet: pipeline late follows it, and has planned txids 1 to 1"
    with pytest.raises(DeclarationChanged, match=refusal):
        evolve(WITHOUT[state], follower, late)
    steps.commit(inbox.settings, late, both, owner="test")
    assert copies(inbox, late) == [(1, "a", 1, None), (1, "b", 2, None), (2, "a", 3, "Rome")]

    follower, late = copied("follower", state, 2, name="text"), copied("late", state, 2, name="text")
    evolve(WITHOUT[state], follower, late)
    inbox.write("3.csv", "b,5,4,Oslo\n")
    inbox.run(WITHOUT[state], "third")
    for each in (follower, late):
        steps.run(inbox.settings, each, "third")
        assert copies(inbox, each) == [(1, "a"), (1, "b"), (2, "a"), (3, "b")]


@pytest.mark.soak
@pytest.mark.sampled(1)
@pytest.mark.parametrize("wait_for_all", [False, True])
def test_what_one_pipeline_wrote_together_is_joined(
    inbox: Inbox, upstream: Pipeline, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch, wait_for_all: bool
) -> None:
    source = Inputs(
        {"rows": Changes("inbox.log", max_rows=1), "totals": Changes("inbox.total"), "names": Changes("inbox.per_name")},
        wait_for_all=wait_for_all,
    )
    states = {"paired": Rows({"name": "text", "amount": "integer", "total": "bigint"})}
    follower = Pipeline(
        "follower",
        source,
        states,
        transform=twin(
            lambda inputs: [
                {**row, "total": total["amount"]}
                for row in inputs["rows"]
                for total in inputs["totals"]
                if total["txid"] == row["txid"]
                and (row["txid"], row["name"]) in {(n["txid"], n["name"]) for n in inputs["names"]}
            ]
        ),
    )
    register(follower)
    look, batches = changes._find_upstream, iter([(1, FILES[1]), (2, FILES[3])])

    def commits_after(connection: Any, source: Changes) -> Any:
        found = look(connection, source)
        if batch := next(batches, None) if source.state == "log" else None:
            inbox.write(f"{batch[0]}.csv", batch[1])
            inbox.run(upstream, f"run {batch[0]}")
        return found

    monkeypatch.setattr(changes, "_find_upstream", commits_after)
    inbox.write("0.csv", FILES[0])
    inbox.run(upstream, "run 0")
    for number in range(4):
        steps.run(inbox.settings, follower, f"run {number}")
    expected = [("a", 1, 3), ("b", 2, 3), ("a", 3, 6), ("b", 4, 21), ("a", 5, 21), ("c", 6, 21)]
    found = [(row["name"], row["amount"], row["total"]) for row in inbox.rows(follower, "paired")]
    assert sorted(found) == sorted(expected)


AS_OWNER = "SELECT set_config('tidegate.writer', 'inbox', true); "
IS_GONE = r"table state\.per_name_changes is gone, or was put back by itself"
LOST = "ALTER TABLE state.per_name_changes RENAME TO lost"
BACK = "ALTER TABLE state.lost RENAME TO per_name_changes"
MADE_AGAIN = "UPDATE tidegate.commit SET committed_at = committed_at {} interval '1 s' WHERE pipeline = 'inbox'"
# What takes something away, what puts it back, and what is said meanwhile.
LOSSES = (
    (MADE_AGAIN.format("+"), MADE_AGAIN.format("-"), "has lost its commit of txid 1, which was followed, or has made it again"),
    (LOST, BACK, IS_GONE),
    (f"{LOST}; CREATE TABLE state.per_name_changes (LIKE state.lost)", f"DROP TABLE state.per_name_changes; {BACK}", IS_GONE),
)


def test_what_is_lost_of_what_is_followed_is_noticed(inbox: Inbox, upstream: Pipeline, follow: Any) -> None:
    follower = follow()
    commit_files(inbox, upstream, FILES[0])
    steps.run(inbox.settings, follower, "first")
    commit_files(inbox, upstream, FILES[0], at=1)
    with StateStore.connect(inbox.settings, user=inbox.settings.pg_owner) as store:
        for loss, repair, message in LOSSES:
            with store.engine.begin() as connection:
                connection.execute(sa.text(loss))
            with pytest.raises(SourceChanged, match=message):
                steps.plan(inbox.settings, follower, run_id="second")
            with store.engine.begin() as connection:
                connection.execute(sa.text(repair))
        assert steps.plan(inbox.settings, follower, run_id="as it was") == [2]
        with store.engine.begin() as connection:
            connection.execute(sa.text(f"{AS_OWNER} DELETE FROM state.per_name_changes WHERE txid = 2 AND name = 'b'"))
    with pytest.raises(SourceChanged, match=r"has 1 row\(s\) in txids 2 to 2, but 2 when the batch was planned"):
        steps.process(inbox.settings, follower, 2, owner="test")


@pytest.mark.promise("limit:Changes.max_txids")
@pytest.mark.sampled(1)
@pytest.mark.usefixtures("divided")
def test_changes_are_removed_as_far_as_no_follower_needs_them(inbox: Inbox, upstream: Pipeline, follow: Any) -> None:
    follower = follow(of={"max_txids": 2})
    spec, state = upstream.spec, upstream.spec.states[0]
    commit_files(inbox, upstream, *FILES)
    with StateStore.connect(inbox.settings) as store:
        assert removable(store, spec, state, 0) == (0, {"follower": 0})
        assert removable(store, spec, state, 0, without=["follower"]) == (5, {})
        with pytest.raises(UsageError, match=r"Pipeline other does not follow inbox\.per_name"):
            removable(store, spec, state, 0, without=["other"])
        steps.run(inbox.settings, follower, "run")  # txids 1 and 2, 3 and 4, 5
        assert removable(store, spec, state, 0) == (4, {"follower": 4})
        assert removable(store, spec, state, 3) == (2, {"follower": 4})
    wanted = inbox.rows(follower, "followed")

    with StateStore.connect(inbox.settings, user=inbox.settings.pg_owner) as owner:
        with pytest.raises(RangeRefused, match="has committed up to txid 5"):
            steps.prune(owner, spec, state, 6)
        done = steps.prune(owner, spec, state, 4)
        in_partitions = ("per_name_changes$1", "per_name_changes$2", "per_name_changes$4")
        assert (done.changes, done.partitions) in ((6, ()), (0, in_partitions))
        assert steps.prune(owner, spec, state, 2)[:2] == (2, 0)
        assert owner.pruned_txid(state) == 4
        assert [change["txid"] for change in owner.changes(state)] == [5]
    steps.redo(inbox.settings, follower, 3, owner="an operator", reason="it was wrong")
    assert inbox.rows(follower, "followed") == wanted

    commit_files(inbox, upstream, "d,7\n", at=5)
    steps.run(inbox.settings, follower, "one more")
    assert followed(inbox, follower) == followed(inbox, upstream)
    late = Pipeline("late", Changes("inbox.per_name"), {"late": State(aggregates={"n": Count()})})
    register_pipelines(inbox.settings, late)
    for version in (1, 2):
        inbox.declare(upstream.source, states=STATES, version=version)
        with pytest.raises(SourceChanged, match="some up to txid 4 were removed"):
            steps.plan(inbox.settings, late, run_id="run")


@pytest.mark.soak
def test_a_batch_of_quarantined_records_needs_no_changes(inbox: Inbox, upstream: Pipeline, follow: Any) -> None:
    follower = follow(check={"few": "amount < 100"}, on_poison="quarantine", of={"max_txids": 1}, transform=counted)
    commit_files(inbox, upstream, "a,1\n", "a,2\n", "a,100\n")
    steps.run(inbox.settings, follower, "run")
    with StateStore.connect(inbox.settings) as store:
        assert removable(store, upstream.spec, upstream.spec.states[0], 0) == (2, {"follower": 2})
        assert store.replay_quarantined(follower.spec, "an operator", "a test", txid=None) == (4, 1)
        steps.run(inbox.settings, follower, "replay")
        assert store.committed("follower") == 4
        assert removable(store, upstream.spec, upstream.spec.states[0], 0) == (2, {"follower": 2})


def test_a_state_that_cannot_be_followed_is_named(inbox: Inbox, register: Callable[..., None]) -> None:
    """Nor does a pipeline of another source begin to follow: what it would miss, or count again, is not known."""
    inbox.declare(Files("inbox", format="csv", schema=SCHEMA), states={"plain": State(aggregates={"lines": Count()})})
    states = {"followed": State(aggregates={"lines": Count()})}
    for version, (of, message) in enumerate(
        [
            ("nothing.per_name", "pipeline nothing is not registered"),
            ("inbox.nothing", "pipeline inbox has no such state"),
            ("inbox.plain", "does not record changes of it: declare the state with changes=True"),
        ],
        start=1,
    ):
        follower = Pipeline("follower", Changes(of), states, version=version)
        register(follower)
        with pytest.raises(SourceUnreadable, match=message):
            steps.plan(inbox.settings, follower, run_id="run")
    inbox.declare(Files("inbox", format="csv", schema=SCHEMA), states=STATES, version=2)
    turned = Pipeline("turned", FixedBatches([[("a",)]], {"name": "string"}), {"seen": State(aggregates={"n": Count()})})
    register(turned)
    assert steps.run(inbox.settings, turned, "first") == [1]
    register(turned := replace(turned, source=Changes("inbox.per_name"), version=2))
    with pytest.raises(SourceChanged, match="the batches before are of another source"):
        steps.plan(inbox.settings, turned, run_id="second")


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: Changes("flights"), "has to name pipeline and state"),
        (lambda: Changes("flights.Daily"), "cannot be the name of a state"),
        (lambda: Changes("flights.daily", max_txids=0), "at least 1"),
        (lambda: State(aggregates={"lines": Count()}, changes=True).spec("plain"), "declare kind='opaque'"),
        (
            lambda: Pipeline("loop", Changes("loop.state"), {"state": State(aggregates={"n": Count()}, kind="opaque")}),
            "follows itself",
        ),
        (
            lambda: Pipeline("two", Changes("a.b"), {"x": replace(PER_NAME), "x_changes": PER_NAME}),
            "two tables named x_changes",
        ),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(declare: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        declare()
