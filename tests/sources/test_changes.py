"""Pipelines that follow the states of others: each change once, in txid order, from end to end."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from tests import steps
from tests.conftest import register_pipelines
from tests.sources.conftest import PER_NAME, Inbox
from tests.sources.in_process import SCHEMA, batches, plan, raises, twin
from tests.statements import execute
from tests.store import HOME_VARIABLE, Redo, Request, cursors, range_partitions, registration
from tidegate import migrations
from tidegate.jobs import Changes, Count, Files, Inputs, Pipeline, Rows, State, Sum
from tidegate.jobs.sources import changes
from tidegate.jobs.sources.changes import removable
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import DeclarationChanged, LockHeld, RangeRefused, SourceChanged, UsageError

pytestmark = pytest.mark.usefixtures("counted_here")

KEPT = {"name": "text", "amount": "integer"}
STATES = {
    "per_name": replace(PER_NAME, kind="opaque", changes=True),
    "total": State(aggregates={"amount": Sum("amount")}, kind="opaque", changes=True),
    "log": Rows(KEPT),
}
FILES = ["a,1\nb,2\n", "a,3\n", "", "b,4\na,5\nc,6\n", "c,-6\n"]


def counted_by_spark(rows: Any) -> Any:
    more, is_new = "amount - coalesce(previous_amount, 0) AS more", "IF(previous_txid IS NULL, 1, NULL) AS is_new"
    return rows.selectExpr("name", more, is_new)


@twin
def counted(inputs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {**row, "more": row["amount"] - (row["previous_amount"] or 0), "is_new": None if row["previous_txid"] else 1}
        for row in inputs[""]
    ]


@pytest.fixture
def upstream(inbox: Inbox) -> Pipeline:
    """A pipeline over the inbox, a file a batch, whose states are followed."""
    return inbox.declare(Files("inbox", format="csv", schema=SCHEMA, header=False), states=STATES)


def follow(inbox: Inbox, transform: Any = counted, **of: int) -> Pipeline:
    aggregates = {"changes": Count(), "amount": Sum("more"), "new": Count("is_new")}
    states = {"followed": State(key={"name": "text"}, aggregates=aggregates, kind="opaque")}
    return inbox.declare(Changes("inbox.per_name", **of), name="follower", states=states, transform=transform)


def commit_files(inbox: Inbox, upstream: Pipeline, *contents: str, at: int = 0) -> None:
    for number, content in enumerate(contents, start=at):
        inbox.write(f"{number}.csv", content)
    inbox.run(upstream, f"run {at}")


@pytest.fixture(params=[1, range_partitions.TXIDS], ids=["partitions", "one partition"])
def divided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide what the inbox and its followers record into a partition for each txid, or do not."""
    monkeypatch.setattr(range_partitions, "TXIDS", request.param)


@pytest.mark.promise("decision:0029")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("limits", [{"max_rows": 2}, {"max_txids": 1}, {}], ids=["two rows", "txid by txid", "one range"])
@pytest.mark.usefixtures("divided")
def test_the_follower_has_each_change_once(inbox: Inbox, upstream: Pipeline, limits: dict[str, int]) -> None:
    follower = follow(inbox, counted_by_spark, **limits)
    for number, content in enumerate(FILES):
        commit_files(inbox, upstream, content, at=number)
        if number in (1, 4):
            steps.run(inbox.settings, follower, f"run {number}")
    assert steps.run(inbox.settings, follower, "nothing new") == []
    assert inbox.tuples(follower) == inbox.tuples(upstream) == [("a", 9), ("b", 6), ("c", 0)]
    assert {row["new"] for row in inbox.rows(follower, "followed")} == {1}


@patch.object(migrations, "DDL_LOCK_TIMEOUT_SECONDS", 0.5)
def test_a_redo_and_a_follower_that_registers_wait_for_each_other(inbox: Inbox, upstream: Pipeline) -> None:
    """So the redo knows each follower that may read what it takes back."""
    follower = Pipeline("follower", Changes("inbox.log"), {"copies": State({"name": "text"}, {"copies": Count()})})
    with StateStore.connect(inbox.settings) as store, store.engine.begin() as redoing:
        cursors.lock(redoing, "inbox")
        raises(LockHeld, lambda: register_pipelines(inbox.settings, follower), "lock")
    impatient = replace(inbox.settings, lock_timeout_seconds=1)
    with StateStore.connect(impatient, user=impatient.pg_owner) as store, migrations.connected(inbox.settings) as registering:
        registration.register(registering, follower.spec)
        raises(LockHeld, lambda: store.redo_batch(upstream.spec, 1, Redo("an operator", "it was wrong")), "lock")


def migrate(settings: Settings, *pipelines: Pipeline) -> None:
    specs = [pipeline.spec for pipeline in pipelines]
    migrations.new_revision(settings, specs, "columns")
    migrations.upgrade(settings, specs)


def copied(name: str, columns: dict[str, str]) -> Pipeline:
    """Declare a follower that appends these columns of all rows that it reads."""
    return Pipeline(name, Changes("inbox.log"), {f"copy_of_{name}": Rows(columns)}, twin(lambda rows: rows[""]))


def test_a_column_of_what_is_followed_comes_and_does_not_go_while_a_batch_needs_it(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("pipelines", "migrations"):
        (inbox.settings.home / folder).mkdir()
    monkeypatch.setenv(HOME_VARIABLE, str(inbox.settings.home))
    source, city = Files("inbox", format="csv", schema={**SCHEMA, "city": "string"}, header=False), {"city": "text"}
    logs = enumerate((KEPT, KEPT | city, {"name": "text"} | city), start=1)
    before, after, without = (Pipeline("inbox", source, {"log": Rows(log)}, version=version) for version, log in logs)
    early, late = copied("early", KEPT), copied("late", KEPT | city)
    migrate(inbox.settings, before, early)
    inbox.write("1.csv", "a,1,Bern\n")
    inbox.run(before, "first")
    assert steps.plan(inbox.settings, early, run_id="first") == [1]
    steps.process(inbox.settings, early, 1, owner="test")
    migrate(inbox.settings, after, early, late)
    steps.process(inbox.settings, early, 1, owner="test", mode="restage")
    assert [bool(each["sealed_at"]) for each in steps.history(inbox.settings, 1, "early").attempts] == [True, True]
    steps.commit(inbox.settings, early, 1, owner="test")
    inbox.write("2.csv", "a,3,Rome\n")
    inbox.run(after, "second")
    assert steps.plan(inbox.settings, late, run_id="late") == [1]
    refusal = "State log .* cannot lose or widen amount yet: pipeline late follows it, and has planned txids 1 to 1"
    raises(DeclarationChanged, lambda: migrate(inbox.settings, without, early, late), refusal)
    steps.complete(inbox.settings, late, 1)
    assert sorted((row["amount"], row["city"]) for row in inbox.rows(late, "copy_of_late")) == [(1, None), (3, "Rome")]


def test_what_one_pipeline_wrote_together_is_joined(inbox: Inbox, upstream: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it commits between the looks at two of its states."""
    source = Inputs({"rows": Changes("inbox.log", max_rows=1), "totals": Changes("inbox.total")})

    @twin
    def joined(inputs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        total = {row["txid"]: row["amount"] for row in inputs["totals"]}
        return [{**row, "total": total[row["txid"]]} for row in inputs["rows"] if row["txid"] in total]

    follower = inbox.declare(source, name="follower", states={"paired": Rows(KEPT | {"total": "bigint"})}, transform=joined)
    look, later = changes._find_upstream, iter([(1, FILES[1]), (2, FILES[3])])

    def commits_after(connection: Any, source: Changes) -> Any:
        found = look(connection, source)
        if batch := next(later, None) if source.state == "log" else None:
            commit_files(inbox, upstream, batch[1], at=batch[0])
        return found

    monkeypatch.setattr(changes, "_find_upstream", commits_after)
    commit_files(inbox, upstream, FILES[0])
    for number in range(4):
        steps.run(inbox.settings, follower, f"run {number}")
    found = [(row["name"], row["amount"], row["total"]) for row in inbox.rows(follower, "paired")]
    assert sorted(found) == [("a", 1, 3), ("a", 3, 6), ("a", 5, 21), ("b", 2, 3), ("b", 4, 21), ("c", 6, 21)]


def test_txids_without_changes_are_no_partner_of_new_rows(inbox: Inbox, upstream: Pipeline) -> None:
    commit_files(inbox, upstream, "")
    inbox.put("others", [("a", 1)])
    both = {"others": Files("others", format="csv", schema=SCHEMA), "log": Changes("inbox.log")}
    (first,) = batches(inbox.settings, Inputs(both, wait_for_all=True))
    commit_files(inbox, upstream, FILES[0], at=1)
    second = plan(inbox.settings, Inputs(both, wait_for_all=True), first)
    assert (first["inputs"].keys(), second["inputs"].keys()) == ({"log"}, {"others", "log"})


IS_GONE = r"table state\.per_name_changes is gone, or was put back by itself"
LOST, BACK = "ALTER TABLE state.per_name_changes RENAME TO lost", "ALTER TABLE state.lost RENAME TO per_name_changes"
MADE_AGAIN = "UPDATE tidegate.commit SET committed_at = committed_at {} interval '1 s' WHERE pipeline = 'inbox'"
# What takes something away, what puts it back, and what is said meanwhile.
LOSSES = (
    (MADE_AGAIN.format("+"), MADE_AGAIN.format("-"), "has lost its commit of txid 1, which was followed, or has made it again"),
    (LOST, BACK, IS_GONE),
    (f"{LOST}; CREATE TABLE state.per_name_changes (LIKE state.lost)", f"DROP TABLE state.per_name_changes; {BACK}", IS_GONE),
)
DELETE = "SELECT set_config('tidegate.writer', 'inbox', true); DELETE FROM state.per_name_changes WHERE txid = 2 AND name = 'b'"


def test_what_is_lost_of_what_is_followed_is_noticed(inbox: Inbox, upstream: Pipeline) -> None:
    follower = follow(inbox)
    commit_files(inbox, upstream, FILES[0])
    steps.run(inbox.settings, follower, "first")
    commit_files(inbox, upstream, FILES[0], at=1)
    owner = inbox.settings.conninfo(user=inbox.settings.pg_owner)
    for loss, repair, message in LOSSES:
        execute(owner, loss)
        raises(SourceChanged, lambda: steps.plan(inbox.settings, follower, run_id="second"), message)
        execute(owner, repair)
    assert steps.plan(inbox.settings, follower, run_id="as it was") == [2]
    execute(owner, DELETE)
    with pytest.raises(SourceChanged, match=r"has 1 row\(s\) in txids 2 to 2, but 2 when the batch was planned"):
        steps.process(inbox.settings, follower, 2, owner="test")


@pytest.mark.promise("I1")
def test_a_follower_does_not_go_on_over_states_that_were_rebuilt(
    inbox: Inbox, upstream: Pipeline, owner: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was retired meanwhile. What follows the rebuild itself keeps that from taking its place."""
    monkeypatch.setenv(HOME_VARIABLE, str(inbox.settings.home))
    (inbox.settings.home / "pipelines").mkdir()
    commit_files(inbox, upstream, FILES[0])
    inbox.run(follow(inbox), "first")
    changed = replace(upstream, version=2, transform=twin(lambda rows: rows[""] * 2))
    owner.retire("follower", Request("me", "in the way"))
    owner.begin_rebuild(changed.spec)
    inbox.run(changed.rebuild(), "rebuild")
    inbox.register(Pipeline("compared", Changes("inbox__v2.per_name__v2"), {"compared": State({}, {"amount": Sum("amount")})}))
    with pytest.raises(DeclarationChanged, match=r"compared follows or reads the states of inbox__v2, .*: retire it first"):
        migrations.upgrade(inbox.settings, [changed.spec])
    owner.retire("compared", Request("me", "compared"))
    migrations.upgrade(inbox.settings, [changed.spec])
    owner.reinstate("follower", "me", "the rebuild has ended")
    raises(SourceChanged, lambda: inbox.run(follow(inbox), "second"), "or its states were rebuilt")


@pytest.mark.promise("limit:Changes.max_txids")
@pytest.mark.sampled(1)
@pytest.mark.usefixtures("divided")
def test_changes_are_removed_as_far_as_no_follower_needs_them(inbox: Inbox, upstream: Pipeline, owner: StateStore) -> None:
    follower = follow(inbox, max_txids=2)
    spec, state = upstream.spec, upstream.spec.states[0]
    commit_files(inbox, upstream, *FILES)
    assert removable(owner, spec, state, 0) == (0, {"follower": 0})
    assert removable(owner, spec, state, 0, without=["follower"]) == (5, {})
    with pytest.raises(UsageError, match=r"Pipeline other does not follow inbox\.per_name"):
        removable(owner, spec, state, 0, without=["other"])
    assert steps.run(inbox.settings, follower, "run") == [1, 2, 3]  # of txids 1 and 2, 3 and 4, 5
    assert removable(owner, spec, state, 0) == (4, {"follower": 4})
    assert removable(owner, spec, state, 3) == (2, {"follower": 4})
    with patch.object(StateStore, "source_metadata", lambda *_: {"after": "part-0", "commit": None}):  # of a table of Delta
        assert removable(owner, spec, state, 0) == (0, {"follower": 0})
    wanted = inbox.rows(follower, "followed")
    raises(RangeRefused, lambda: steps.prune(owner, spec, state, 6), "has committed up to txid 5")
    done = steps.prune(owner, spec, state, 4)
    in_partitions = ("per_name_changes$1", "per_name_changes$2", "per_name_changes$4")
    assert (done.changes, done.partitions) in ((6, ()), (0, in_partitions))
    assert [change["txid"] for change in owner.changes(state)] == [5]
    steps.redo(inbox.settings, follower, 3, owner="an operator", reason="it was wrong")
    assert inbox.rows(follower, "followed") == wanted
    commit_files(inbox, upstream, "d,7\n", at=5)
    steps.run(inbox.settings, follower, "one more")
    assert inbox.tuples(follower) == inbox.tuples(upstream)
    late = Pipeline("late", Changes("inbox.per_name"), {"late": State(aggregates={"n": Count()})})
    register_pipelines(inbox.settings, late)
    raises(SourceChanged, lambda: steps.plan(inbox.settings, late, run_id="run"), "some up to txid 4 were removed")
