"""Only what is registered counts: a declaration is fixed, a state has one writer, a retired pipeline never counts again."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from tests.integration.conftest import ROW, TALLY, Tally, TallyOf, contents, holding, until
from tests.store import PipelineSpec, StateReader, attempts, errors, heartbeats, range_partitions, registration, retirement
from tidegate import migrations
from tidegate.explain.why import explain
from tidegate.jobs import Changes, Count, FixedBatches, History, Inputs, Pipeline, PostgresTable, Ranges, Rows, State, Update
from tidegate.state_store import Settings, StateStore

DAY = [("2013-01-01", 1)]
SPEC = TALLY.spec
REQUEST = retirement.Request("anna, tidegate retire", "replaced by tally_by_hour")


@pytest.fixture
def busy(tally: Tally) -> Tally:
    return tally.having(3, 2, 1, days=DAY)


def retire(store: StateStore, pipeline: str = "tally", **changes: object) -> retirement.Retirement:
    while True:
        done = store.retire(pipeline, replace(REQUEST, **changes))
        if not done.are_more:
            return done


def register_spec(settings: Settings, spec: PipelineSpec) -> bool:
    with migrations.connected(settings) as connection:
        return registration.register(connection, spec)


ANOTHER_SOURCE = replace(SPEC, source_identity="elsewhere")
SHOPS, DAYS = SPEC.states
SOLD = DAYS.values[0]
CHANGES = [
    (SOLD, replace(SOLD, name="latest")),
    (replace(SOLD, type=replace(SOLD.type, name="integer")),),
    (replace(SOLD, merge="max"),),
    (replace(SOLD, computed="sum(another)"),),
]


@pytest.mark.promise("I16", "decision:0007")
def test_a_declaration_is_fixed_from_the_first_commit_on(tally: Tally, settings: Settings) -> None:
    tally.having(3, 1, 1)
    tally.process(3)
    register = partial(register_spec, settings)
    assert register(SPEC) is False
    for days in ((), *((replace(DAYS, values=values),) for values in CHANGES)):
        changed = replace(SPEC, states=(SHOPS, *days))
        says = r"tally has committed a batch into other states than these"
        steps = [partial(register, replace(changed, version=2)), partial(migrations.new_revision, settings, [changed], "x")]
        tally.refuses(errors.DeclarationChanged, says, *steps)
    says = r"tally has committed 1 batches from another source.*version above 1"
    tally.refuses(errors.DeclarationChanged, says, partial(register, ANOTHER_SOURCE))
    tally.complete(2)

    raised = replace(ANOTHER_SOURCE, version=2)
    assert register(raised) is True
    later = Tally(tally.store, raised)
    with pytest.raises(errors.Unprocessed, match="another declaration"):
        later.commit(3)
    later.complete(3)
    assert register(replace(raised, version=3)) is True
    assert tally.store.committed("tally") == 3


@pytest.mark.promise("I15")
def test_a_state_has_one_writer(tally: Tally, settings: Settings) -> None:
    states = {"outbox": Update({"a": "integer"}, lambda _batch: None)}
    outbox = Pipeline("one", FixedBatches([], {"a": "int"}), states=states).spec
    other = replace(SPEC, name="other", states=(replace(DAYS, name="per_month"),))
    for spec in (outbox, outbox, other):
        register_spec(settings, spec)
    keyed = replace(SPEC, name="two", states=(replace(SHOPS, name="outbox"),))
    for spec, says in (
        (replace(SPEC, name="two"), r"State per_shop of pipeline two belongs to pipeline tally.*Rename one"),
        (replace(outbox, name="two"), r"State outbox of pipeline two belongs to pipeline one.*Rename one"),
        (keyed, r"State outbox of pipeline two belongs to pipeline one.*Rename one"),
        (replace(SPEC, states=other.states), "per_month of pipeline tally belongs to pipeline other"),
    ):
        tally.refuses(errors.DeclarationChanged, says, partial(register_spec, settings, spec))


@pytest.mark.promise("I23", "fault:pipeline-is-retired:processing", "error:PIPELINE_RETIRED", "decision:0046")
def test_no_step_of_a_retired_pipeline_goes_on(busy: Tally, owner: StateStore, settings: Settings) -> None:
    store = busy.store
    busy.refuses(Exception, "permission denied", lambda: retire(store), lambda: store.reinstate("tally", "x", "x"))
    unknown = "Pipeline unknown is not registered in this database"
    steps = [lambda: retire(owner, "unknown"), lambda: owner.reinstate("unknown", "anna", "x")]
    busy.refuses(errors.UnknownPipeline, unknown, *steps)

    done = retire(owner)
    assert (done.already, done.committed, done.uncommitted, done.states) == (False, 1, 2, ["per_day", "per_shop"])
    before = contents(settings)
    busy.refuses(
        errors.PipelineRetired,
        r"tally was retired by anna, tidegate retire on .* UTC: replaced by .* and how: tidegate why tally",
        *busy.next_steps(2),
        partial(store.skip_batch, SPEC, 2, "test", "x"),
        partial(store.replay_quarantined, SPEC, "test", "x"),
        partial(store.retry, "tally", None, "test", "x"),
        partial(store.pause, "tally", "test", "x"),
        partial(store.resume, "tally", "test", "x"),
        partial(store.check_not_paused, "tally"),
    )
    assert busy.commit(1).already_committed
    store.halt_batch("tally", 3, "PIPELINE_RETIRED: as its task says, when it has failed")
    again = retire(owner, owner="ben", reason="twice")
    assert (again.already, again.retired) == (True, done.retired)
    assert contents(settings) == before

    turns = store.turns([("tally", 1), ("tally", 2), ("tally", 3)])
    assert [turns["tally", txid].halted for txid in (1, 2, 3)] == [None, *["the pipeline was retired"] * 2]
    assert store.lag() == []
    (retired,) = store.retired_pipelines()
    assert (retired.pipeline, retired.committed, retired.retired_by) == ("tally", 1, "anna, tidegate retire")
    assert [status.waits_for for status in store.batch_statuses("tally")] == [None, *["nothing: its pipeline was retired"] * 2]
    (cause,) = explain(store, TALLY).causes
    assert (cause.code, cause.severity, cause.command) == ("RETIRED", "ok", "tidegate reinstate tally")
    assert "tally was retired by anna, tidegate retire: replaced by tally_by_hour." in cause.sentence
    with StateReader.open(settings, "tally", "per_shop") as reader:
        assert reader.get_many([("a",)]).rows == [{"shop": "a", "sold": 1, "cents": 1, "least": 1, "most": 1, "txid": 1}]
    for spec in (SPEC, replace(SPEC, version=2)):
        with pytest.raises(errors.PipelineRetired, match="tally was retired"):
            register_spec(settings, spec)
    with pytest.raises(errors.DeclarationChanged, match=r"State per_day of pipeline other belongs to pipeline tally: that was"):
        register_spec(settings, replace(SPEC, name="other", states=SPEC.states[1:]))


@pytest.mark.promise("I23", "fault:pipeline-is-retired:processing")
def test_a_process_that_began_before_is_fenced(busy: Tally, owner: StateStore) -> None:
    late = busy.start(3)
    staged = [busy.stage(late, "per_shop", ROW)]
    says = r"tally is at work: attempt 1 at txid 3, by test\. Let no other run begin"
    busy.refuses(errors.AttemptNotSealed, says, lambda: retire(owner))
    busy.sql(f"UPDATE tidegate.attempt SET seen_at = now() - interval '{heartbeats.LONGEST_SILENCE_SECONDS + 1} s'")
    assert retire(owner).uncommitted == 2
    assert [status.phase for status in busy.store.batch_statuses("tally")] == ["committed", "processed", "failed"]
    for _ in range(2):
        assert not busy.store.keep_alive(late)
        says = r"tally 3:1 was recorded as failed: ATTEMPT_FENCED: the pipeline was retired"
        with pytest.raises(errors.AttemptFenced, match=says):
            busy.store.seal(late, staged, attempts.Tracked(1))
        owner.reinstate("tally", "anna", "still in use")
    assert busy.commit(2).key_count == 2
    assert busy.complete(3, ROW).attempt == 2
    assert busy.state() == [("a", 3, 3, 1, 1, 3)]
    assert [action["action"] for action in busy.store.batch_history("tally", 3).actions] == ["retire", "reinstate"]


@pytest.mark.promise("I23", "fault:pipeline-is-retired:commit")
def test_a_commit_and_a_retirement_wait_for_each_other(busy: Tally, owner: StateStore, waiting: Callable[[], int]) -> None:
    busy.process(3, ROW, DAY)
    lock = "SELECT FROM tidegate.cursor WHERE pipeline = 'tally' FOR UPDATE"
    with ThreadPoolExecutor(2) as threads, holding(busy.store.settings, lock):
        retiring = threads.submit(retire, owner)
        until(lambda: waiting() == 1)
        committing = threads.submit(busy.commit, 2)
        until(lambda: waiting() == 2)
    assert not retiring.result().already
    with pytest.raises(errors.PipelineRetired):
        committing.result()
    assert busy.store.committed("tally") == 1


@pytest.fixture
def shop(tally_of: TallyOf) -> Tally:
    states = {
        "sales": Rows({"a": "integer"}, range_partitions=Ranges("a", 10)),
        "sums": State({"a": "integer"}, {"n": Count()}),
        "names": History(key={"a": "integer"}, columns={"b": "integer"}, order_by={"at": "timestamptz"}),
    }
    return tally_of(Pipeline("shop", FixedBatches([], {"a": "int"}), states=states))


def test_a_followed_pipeline_is_not_retired(shop: Tally, owner: StateStore, settings: Settings, register: Callable) -> None:
    inputs = Inputs({"sales": Changes("shop.sales"), "more": FixedBatches([], {"a": "int"})})
    follower = Pipeline("totals", inputs, states={"total": State({}, {"n": Count()})}, transform=lambda rows: rows)
    register(follower)
    says = r"shop cannot be retired: totals follows or reads its states\. First retire totals"
    shop.refuses(errors.UsageError, says, lambda: retire(owner, "shop"))
    retire(owner, "totals")
    retire(owner, "shop")
    with pytest.raises(errors.PipelineRetired, match=r"totals follows or reads states of shop, and shop was retired"):
        owner.reinstate("totals", "anna", "back")
    another = replace(follower.spec, name="others", states=(replace(follower.spec.states[0], name="other"),))
    with pytest.raises(errors.PipelineRetired, match=r"others follows or reads states of shop"):
        register_spec(settings, another)
    assert owner.reinstate("shop", "anna", "back")
    assert owner.reinstate("totals", "anna", "back")


def test_what_needs_the_tables_of_a_state_keeps_them(busy: Tally, owner: StateStore, register: Callable) -> None:

    def is_refused(error: type[Exception], says: str) -> None:
        busy.refuses(error, says, lambda: retire(owner, drops_states=True))

    busy.sql("CREATE SCHEMA reports; CREATE VIEW reports.shops AS SELECT shop FROM state.per_shop")
    busy.sql(
        "CREATE TABLE state.more () INHERITS (state.per_shop); ALTER TABLE state.more OWNER TO tidegate_owner; "
        "CREATE SCHEMA kept; CREATE TABLE kept.per_day () INHERITS (state.per_shop)",
        role="postgres",
    )
    is_refused(errors.PermanentError, r"table state\.more depends on table state\.per_shop; table kept\.per_day depends")
    busy.sql("DROP TABLE state.more, kept.per_day", role="postgres")
    is_refused(errors.PermanentError, r"state\.per_shop .*: view reports\.shops depends on table .*Drop that first")
    busy.sql("DROP VIEW reports.shops")
    days = PostgresTable(table='state."per_day"', key="sold", schema={"sold": "bigint"}, key_is_drawn=True)
    register(Pipeline("other", days, states={"other_days": State({}, {"n": Count()})}))
    assert retire(owner).mentioned_by == ["other"]
    done = retire(owner, drops_states=True, owner="ben", reason="no report reads them")
    assert (done.already, done.dropped, done.retired.by) == (True, ["per_day", "per_shop"], "anna, tidegate retire")
    assert busy.sql("SELECT action, owner, reason FROM tidegate.operator_action ORDER BY number") == [
        ("retire", "anna, tidegate retire", "replaced by tally_by_hour"),
        ("retire", "ben", "its states are dropped: no report reads them"),
    ]


@pytest.mark.promise("I23")
def test_rows_that_no_batch_of_the_pipeline_has_brought_stop_its_registration(busy: Tally, register: Callable) -> None:
    """As after a person has deleted a pipeline from the ledger: the same name would count on top of them from txid 1 on."""
    ledger = ("seal", "commit", "run_batch", "plan", "cursor", "state_table", "attempt", "batch", "operator_action", "pipeline")
    busy.sql("; ".join(f"DELETE FROM tidegate.{name}" for name in ledger))
    with pytest.raises(errors.DeclarationChanged, match=r"Table state\.per_(shop|day) has rows, .* or drop the table"):
        register(TALLY)
    busy.sql("DROP TABLE state.per_shop, state.per_day")
    register(TALLY)


@pytest.mark.promise("decision:0046")
def test_states_are_dropped_with_all_their_parts(shop: Tally, owner: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_partitions, "MOST_AT_ONCE", 2)
    values, tables = [1, 11, 21], ["names", "names_versions", "sales", "sums"]
    names = [(value, "2026-01-01", 1) for value in values]
    shop.having(1, 1, 1, sales=enumerate(values), sums=[(value, 1) for value in values], names=names)
    looked = owner.retire("shop", replace(REQUEST, drops_states=True, is_confirmed=False))
    assert (sorted(looked.dropped), looked.retired.at, looked.are_more) == (tables, None, False)
    assert [lag.pipeline for lag in shop.store.lag()] == ["shop"]

    dropped: list[str] = []
    while (done := owner.retire("shop", replace(REQUEST, drops_states=True))).are_more:
        dropped += done.dropped
        with pytest.raises(errors.RangeRefused, match="its states were dropped"):
            owner.reinstate("shop", "anna", "back")
    assert dropped
    assert sorted(dropped + done.dropped) == tables
    left = "SELECT relname FROM pg_class WHERE relnamespace = 'state'::regnamespace AND relkind IN ('r', 'p', 'v')"
    assert [name for (name,) in shop.sql(left) if name.partition("$")[0] in tables] == []
    assert shop.sql("SELECT FROM tidegate.state_range") == []
    assert retire(owner, "shop", drops_states=True).dropped == []
    assert [status.phase for status in shop.store.batch_statuses("shop")] == ["committed"]
    (cause,) = explain(shop.store, "shop").causes
    assert (cause.code, cause.command) == ("RETIRED", None)
    assert "reinstate" not in migrations.retired(shop.store.settings, [shop.spec])["shop"]
    says = r"shop cannot be reinstated: its states were dropped \(names, names_versions"
    shop.refuses(errors.RangeRefused, says, partial(owner.reinstate, "shop", "anna", "back"))
    with StateReader.open(shop.store.settings, "shop", "sums") as reader, pytest.raises(errors.PipelineRetired):
        reader.get_many([(1,)])
