"""A retired pipeline never counts again under its name; what it was is kept, and may be reinstated where it stood."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import psycopg2
import pytest
import sqlalchemy as sa

from tests.integration.conftest import TALLY, Execute, Tally, contents, refused, until
from tests.store import (
    LedgerReader,
    PipelineSpec,
    Request,
    Retirement,
    StateReader,
    attempts,
    key_lookup,
    measures,
    range_partitions,
    registration,
    retirement,
    state_tables,
)
from tidegate import migrations
from tidegate.explain.why import explain
from tidegate.jobs import Changes, Count, FixedBatches, History, Inputs, Pipeline, PostgresTable, Ranges, Rows, State
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import (
    AttemptFenced,
    AttemptNotSealed,
    DeclarationChanged,
    PermanentError,
    PipelineRetired,
    RangeRefused,
    StoreUnavailable,
    UnknownPipeline,
    Unprocessed,
    UsageError,
)

ROW, DAY = [("a", 1, 5, 5, 5)], [("2013-01-01", 1)]
SPEC = TALLY.spec
REQUEST = Request("anna, tidegate retire", "replaced by tally_by_hour")


@pytest.fixture
def owner(settings: Settings) -> Iterator[StateStore]:
    with StateStore.connect(settings, user=settings.pg_owner) as store:
        yield store


@pytest.fixture
def busy(tally: Tally) -> Tally:
    """Tally with a commit, a sealed batch and a planned one."""
    tally.plan(3)
    tally.process(1, ROW, DAY)
    tally.commit(1)
    tally.process(2, ROW, DAY)
    return tally


def retire(store: StateStore, pipeline: str = "tally", **changes: object) -> Retirement:
    """Retire a pipeline, with all transactions that this takes."""
    while True:
        done = store.retire(pipeline, replace(REQUEST, **changes))
        if not done.are_more:
            return done


def drop_all_staging(store: StateStore) -> int:
    dropped = 0
    while some := store.drop_staging_of_retired("tally"):
        dropped += some
    return dropped


def staging_tables(as_role: Execute) -> list[tuple]:
    return as_role("tidegate", "SELECT relname FROM pg_class WHERE relnamespace = 'staging'::regnamespace AND relkind = 'r'")


# what is refused afterwards


@pytest.mark.promise("I23", "fault:pipeline-is-retired:processing", "error:PIPELINE_RETIRED", "decision:0046")
def test_no_step_of_a_retired_pipeline_goes_on(busy: Tally, owner: StateStore, settings: Settings) -> None:
    """Plan, attempt, commit and every verb name who retired it, when and why."""
    untouched = contents(settings)
    for step in (lambda: retire(busy.store), lambda: busy.store.reinstate("tally", "x", "x")):
        with pytest.raises(Exception, match="permission denied"):
            step()
    for call in (lambda: retire(owner, "unknown"), lambda: owner.reinstate("unknown", "anna", "x")):
        with pytest.raises(UnknownPipeline, match="Pipeline unknown is not registered in this database"):
            call()
    assert contents(settings) == untouched

    done = retire(owner)
    assert (done.already, done.committed, done.uncommitted, done.states) == (False, 1, 2, ["per_day", "per_shop"])
    before, store = contents(settings), busy.store
    steps: list[Callable[[], object]] = [
        lambda: busy.plan(run_id="next"),
        lambda: busy.start(3),
        lambda: busy.commit(2),
        lambda: store.commit_ready(SPEC, "test"),
        lambda: store.skip_batch(SPEC, 2, "test", "x"),
        lambda: store.replay_quarantined(SPEC, "test", "x"),
        lambda: store.retry("tally", None, "test", "x"),
        lambda: store.pause("tally", "test", "x"),
        lambda: store.resume("tally", "test", "x"),
        lambda: store.check_not_paused("tally"),
    ]
    for step in steps:
        with pytest.raises(PipelineRetired, match=r"tally was retired by anna, tidegate retire on .* UTC: replaced by"):
            step()
    assert busy.commit(1).already_committed
    assert contents(settings) == before
    store.halt_batch("tally", 3, "PIPELINE_RETIRED: as its task says, when it has failed")
    assert contents(settings) == before
    again = retire(owner, owner="ben", reason="twice")
    assert (again.already, again.retired) == (True, done.retired)
    assert contents(settings) == before

    turns = store.turns([("tally", 1), ("tally", 2), ("tally", 3)])
    halted = [turns["tally", txid].halted for txid in (1, 2, 3)]
    assert halted == [None, "the pipeline was retired", "the pipeline was retired"]
    assert busy.store.lag() == []
    with LedgerReader(settings) as reader, reader.snapshot("measuring") as connection:
        assert measures(connection, reader.witness).pipelines == []
    (retired,) = busy.store.retired_pipelines()
    assert (retired.pipeline, retired.committed, retired.retired_by) == ("tally", 1, "anna, tidegate retire")
    waits = {status.txid: status.waits_for for status in busy.store.batch_statuses("tally")}
    assert waits == {1: None, 2: "nothing: its pipeline was retired", 3: "nothing: its pipeline was retired"}
    for txid in (None, 3):
        (cause,) = explain(busy.store, TALLY, txid).causes
        assert (cause.code, cause.severity, cause.command) == ("RETIRED", "ok", "tidegate reinstate tally")
        assert "tally was retired by anna, tidegate retire: replaced by tally_by_hour." in cause.sentence
    assert [cause.code for cause in explain(busy.store, TALLY, 1).causes] == ["COMMITTED"]
    actions = busy.store.batch_history("tally", 3).actions
    assert [(action["action"], action["reason"]) for action in actions] == [("retire", "replaced by tally_by_hour")]

    found = {"shop": "a", "sold": 1, "cents": 5, "least": 5, "most": 5, "txid": 1}
    assert key_lookup.get(settings, SPEC.states[0], [("a",)]) == [found]
    with StateReader.open(settings, "tally", "per_shop") as reader:
        assert (reader.get_many([("a",)]).txid, reader.get_many([("a",)]).rows) == (1, [found])

    with pytest.raises(PipelineRetired, match="tally was retired"):
        register_spec(settings, SPEC)
    with pytest.raises(PipelineRetired, match="tally was retired"):
        register_spec(settings, replace(SPEC, version=2))
    with pytest.raises(DeclarationChanged, match=r"State per_day of pipeline other belongs to pipeline tally: that was"):
        register_spec(settings, replace(SPEC, name="other", states=SPEC.states[1:]))


@pytest.mark.promise("I23", "fault:pipeline-is-retired:processing")
def test_a_process_that_began_before_is_fenced(busy: Tally, owner: StateStore, as_role: Execute) -> None:
    late = busy.start(3)
    staged = [busy.stage(late, "per_shop", ROW)]
    silent_for(as_role, attempts.LONGEST_SILENCE_SECONDS + 1)
    retire(owner)
    for _ in range(2):
        assert not busy.store.keep_alive(late)
        with pytest.raises(AttemptFenced, match=r"tally 3:1 was recorded as failed: ATTEMPT_FENCED: the pipeline was retired"):
            busy.store.seal(late, staged, attempts.Tracked(1))
        owner.reinstate("tally", "anna", "still in use")
    assert busy.commit(2).key_count == 2
    busy.process(3, ROW)
    assert busy.commit(3).attempt == 2
    assert busy.state() == [("a", 3, 15, 5, 5, 3)]


def silent_for(as_role: Execute, seconds: int) -> None:
    """Let all attempts have sent their last heartbeat so long ago."""
    as_role("tidegate_owner", "UPDATE tidegate.attempt SET seen_at = now() - make_interval(secs => %s)", [seconds])


def test_a_pipeline_at_work_is_not_retired(busy: Tally, owner: StateStore, settings: Settings, as_role: Execute) -> None:
    busy.start(3)
    with refused(settings, AttemptNotSealed, match=r"tally is at work: attempt 1 at txid 3, by test\. Let no other run begin"):
        retire(owner)
    silent_for(as_role, attempts.LONGEST_SILENCE_SECONDS + 1)
    assert retire(owner).uncommitted == 2
    statuses = {status.txid: status.phase for status in busy.store.batch_statuses("tally")}
    assert statuses == {1: "committed", 2: "processed", 3: "failed"}


@pytest.mark.promise("I23", "fault:pipeline-is-retired:commit")
def test_a_commit_and_a_retirement_wait_for_each_other(busy: Tally, owner: StateStore, waiting: Callable[[], int]) -> None:
    busy.process(3, ROW, DAY)
    with ThreadPoolExecutor(2) as threads, busy.store.engine.begin() as connection:
        connection.execute(sa.text("SELECT FROM tidegate.cursor WHERE pipeline = 'tally' FOR UPDATE"))
        retiring = threads.submit(retire, owner)
        until(lambda: waiting() == 1)
        committing = threads.submit(busy.commit, 2)
        until(lambda: waiting() == 2)
    assert not retiring.result().already
    with pytest.raises(PipelineRetired):
        committing.result()
    assert busy.store.committed("tally") == 1


def ask(settings: Settings, query: str) -> list[tuple]:
    with closing(psycopg2.connect(**settings.conninfo(user="postgres"))) as connection, connection.cursor() as cursor:
        cursor.execute(query)
        return cursor.fetchall()


# who else needs it


@pytest.fixture
def shop(settings: Settings, register: Callable, store: StateStore) -> Tally:
    """Pipeline shop, with rows that others follow, divided by ranges, a history and a state by key."""
    declared = Pipeline(
        "shop",
        FixedBatches([], {"a": "int"}),
        states={
            "sales": Rows({"a": "integer"}, range_partitions=Ranges("a", 10)),
            "sums": State({"a": "integer"}, {"n": Count()}),
            "names": History(key={"a": "integer"}, columns={"b": "integer"}, order_by={"at": "timestamptz"}),
        },
    )
    register(declared)
    return Tally(store, declared.spec)


def commit_sales(shop: Tally, values: list[int]) -> None:
    (txid,) = shop.plan(run_id=f"run {values}")
    attempt = shop.start(txid)
    staged = [
        shop.stage(attempt, "sales", enumerate(values)),
        shop.stage(attempt, "sums", [(value, 1) for value in set(values)]),
        shop.stage(attempt, "names", [(value, "2026-01-01", 1) for value in set(values)]),
    ]
    shop.store.seal(attempt, staged, attempts.Tracked(len(values)))
    shop.commit(txid)


def test_a_followed_pipeline_is_not_retired(shop: Tally, owner: StateStore, settings: Settings, register: Callable) -> None:
    inputs = Inputs({"sales": Changes("shop.sales"), "more": FixedBatches([], {"a": "int"})})
    follower = Pipeline("totals", inputs, states={"total": State({}, {"n": Count()})}, transform=lambda rows: rows)
    register(follower)
    with refused(
        settings, UsageError, match=r"shop cannot be retired: totals follows or reads its states\. First retire totals"
    ):
        retire(owner, "shop")
    retire(owner, "totals")
    retire(owner, "shop")
    with pytest.raises(PipelineRetired, match=r"totals follows or reads states of shop, and shop was retired"):
        owner.reinstate("totals", "anna", "back")
    another = replace(follower.spec, name="others", states=(replace(follower.spec.states[0], name="other"),))
    with pytest.raises(PipelineRetired, match=r"others follows or reads states of shop"):
        register_spec(settings, another)
    assert owner.reinstate("shop", "anna", "back")
    assert owner.reinstate("totals", "anna", "back")


def register_spec(settings: Settings, spec: PipelineSpec) -> bool:
    with migrations.connected(settings) as connection:
        return registration.register(connection, spec)


@pytest.mark.promise("limit:DDL_LOCK_TIMEOUT_SECONDS")
def test_what_needs_the_tables_of_a_state_keeps_them(
    owner: StateStore, register: Callable, busy: Tally, as_role: Execute, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A team's view, or a table that inherits from one, is named, and nothing is done."""
    as_role("tidegate_owner", "CREATE SCHEMA reports; CREATE VIEW reports.shops AS SELECT shop FROM state.per_shop")
    as_role("postgres", "CREATE TABLE state.more () INHERITS (state.per_shop); ALTER TABLE state.more OWNER TO tidegate_owner")
    as_role("postgres", "CREATE SCHEMA kept; CREATE TABLE kept.per_day () INHERITS (state.per_shop)")
    days = PostgresTable(table='state."per_day"', key="sold", schema={"sold": "bigint"}, key_is_drawn=True)
    register(Pipeline("other", days, states={"other_days": State({}, {"n": Count()})}))
    before = contents(settings)
    with pytest.raises(
        PermanentError, match=r"table state\.more depends on table state\.per_shop; table kept\.per_day depends"
    ):
        retire(owner, drops_states=True)
    as_role("postgres", "DROP TABLE state.more, kept.per_day")
    with pytest.raises(PermanentError, match=r"state\.per_shop .*: view reports\.shops depends on table .*Drop that first"):
        retire(owner, drops_states=True)
    as_role("tidegate_owner", "DROP VIEW reports.shops")
    monkeypatch.setattr(retirement, "DDL_LOCK_TIMEOUT_SECONDS", 0.2)
    with busy.store.engine.begin() as connection:
        connection.execute(sa.text("SELECT FROM state.per_shop"))
        with pytest.raises(StoreUnavailable, match="a lock timeout"):
            retire(owner, drops_states=True)
    after = contents(settings)
    after.pop("state.more", None)
    assert after == {name: rows for name, rows in before.items() if name != "state.more"}

    assert retire(owner).mentioned_by == ["other"]
    done = retire(owner, drops_states=True, owner="ben", reason="nobody reads them")
    assert (done.already, done.dropped, done.retired.by) == (True, ["per_day", "per_shop"], "anna, tidegate retire")
    actions = as_role("postgres", "SELECT action, owner, reason FROM tidegate.operator_action ORDER BY number")
    assert actions == [
        ("retire", "anna, tidegate retire", "replaced by tally_by_hour"),
        ("retire", "ben", "its states are dropped: nobody reads them"),
    ]


# what stays


@pytest.mark.promise("I23")
def test_rows_that_no_batch_of_the_pipeline_has_brought_stop_its_registration(
    busy: Tally, settings: Settings, as_role: Execute
) -> None:
    """As after a person has deleted a pipeline from the ledger: the same name would count on top of them from txid 1 on."""
    ledger = ("seal", "commit", "run_batch", "plan", "cursor", "state_table", "attempt", "batch", "operator_action", "pipeline")
    as_role("tidegate_owner", "; ".join(f"DELETE FROM tidegate.{name}" for name in ledger))
    with pytest.raises(DeclarationChanged, match=r"Table state\.per_(shop|day) has rows, and no batch of pipeline tally"):
        register_spec(settings, SPEC)
    as_role("tidegate_owner", "DROP TABLE state.per_shop, state.per_day")
    with migrations.connected(settings) as connection:
        state_tables.metadata_of((SPEC,)).create_all(connection)
    assert register_spec(settings, SPEC)


# reinstating


@pytest.mark.promise("I23")
def test_a_reinstated_pipeline_goes_on_where_it_stood(busy: Tally, owner: StateStore, as_role: Execute) -> None:
    """The state equals that of a pipeline that was never retired; staging that was dropped is made again."""
    assert not owner.reinstate("tally", "anna", "never retired")
    retire(owner)
    assert drop_all_staging(busy.store) == 2
    assert staging_tables(as_role) == []
    assert owner.reinstate("tally", "anna", "still in use")
    assert drop_all_staging(busy.store) == 0
    with pytest.raises(Unprocessed, match="its table is gone"):
        busy.commit(2)
    busy.process(2, ROW, DAY, mode="restage")
    busy.commit(2)
    busy.process(3, ROW, DAY)
    busy.commit(3)
    assert busy.state() == [("a", 3, 15, 5, 5, 3)]
    assert [lag.pipeline for lag in busy.store.lag()] == ["tally"]
    actions = [action["action"] for action in busy.store.batch_history("tally", 3).actions]
    assert actions == ["retire", "reinstate"]


# dropping its states


STATE_RELATIONS = "SELECT relname FROM pg_class WHERE relnamespace = 'state'::regnamespace AND relkind IN ('r', 'p', 'v')"


@pytest.mark.promise("decision:0046")
def test_states_are_dropped_with_all_their_parts(
    shop: Tally, owner: StateStore, as_role: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By several transactions, during which the pipeline cannot be reinstated any more."""
    commit_sales(shop, [1, 11, 21])
    monkeypatch.setattr(range_partitions, "MOST_AT_ONCE", 2)
    looked = owner.retire("shop", replace(REQUEST, drops_states=True, is_confirmed=False))
    assert sorted(looked.dropped) == ["names", "names_versions", "sales", "sums"]
    assert (looked.retired.at, looked.are_more) == (None, False)
    assert [lag.pipeline for lag in shop.store.lag()] == ["shop"]

    dropped: list[str] = []
    while True:
        done = owner.retire("shop", replace(REQUEST, drops_states=True))
        dropped += done.dropped
        if not done.are_more:
            break
        with pytest.raises(RangeRefused, match="its states were dropped"):
            owner.reinstate("shop", "anna", "back")
    assert sorted(dropped) == ["names", "names_versions", "sales", "sums"]
    assert [name for (name,) in as_role("postgres", STATE_RELATIONS) if name.partition("$")[0] in dropped] == []
    assert as_role("postgres", "SELECT FROM tidegate.state_range") == []
    assert retire(owner, "shop", drops_states=True).dropped == []
    assert [status.phase for status in shop.store.batch_statuses("shop")] == ["committed"]
    with pytest.raises(RangeRefused, match=r"shop cannot be reinstated: its states were dropped \(names, names_versions"):
        owner.reinstate("shop", "anna", "back")
    with (
        StateReader.open(shop.store.settings, "shop", "sums") as reader,
        pytest.raises(PipelineRetired, match="shop was retired"),
    ):
        reader.get_many([(1,)])


# crashes and roles


RETIRED = "SELECT pipeline, retired_by, retired_reason FROM tidegate.pipeline"
ACTIONS = "SELECT owner, reason FROM tidegate.operator_action WHERE action = 'retire' ORDER BY number"
STAGED = (
    "SELECT relname FROM pg_class WHERE relnamespace = 'staging'::regnamespace "
    "UNION ALL SELECT txid::text FROM tidegate.attempt WHERE dropped_at IS NULL"
)
