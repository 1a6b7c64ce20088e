"""Batches that wait for their commit are merged together, with the same result as one by one."""

import random
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa

from tests.integration.conftest import BIGINT_MAX, TALLY, Execute, Row, Tally, TallyOf, merge_steps, refused
from tests.store import MAX_BATCHES_TOGETHER, Commit, StateSpec, Tracked, combine_batches, encode_metadata
from tidegate import migrations
from tidegate.jobs import Avg, Count, Files, Max, Min, Newest, Pipeline, State, Sum, Variance
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import GuardMismatch, Overflow, PermanentError, SourceChanged, StoreUnavailable

# Values of each type.
VALUES: dict[str, list[Any]] = {
    "bigint": list(range(-5, 6)),
    "boolean": [True, False],
    "text": ["", "a", "b", "ä"],
    "numeric(12,2)": ["-1.25", "0.50", "3.75"],
    "uuid": [str(uuid.UUID(int=number * 2**123)) for number in range(20)],
    "timestamp": [f"{1 + number * 450:04d}-01-31 02:30:00.00000{number % 9 + 1}" for number in range(20)],
    "bytea": [f"\\x{'ff' * (number % 4)}{number:02x}" for number in range(20)],
    "date": [f"{year}-12-31" for year in range(1, 9999, 500)],
    "timestamptz": [f"{year}-12-31 00:00:00+00" for year in range(1, 9999, 500)],
}


def _pipeline(name: str, **states: Any) -> Pipeline:
    source = Files(name, glob="*.csv", format="csv", schema={"shop": "string", "cents": "int"})
    return Pipeline(name, source, states, guarantee="at_least_once")


def _newest(*key: str) -> Any:
    return Newest({f"key_{kind}": kind for kind in key}, {"label": "text"}, {"at": "bigint"}, null_keys=key == ("text",))


STATES: dict[str, Any] = {
    **{
        f"per_{kind}": State(
            {"key": kind}, {"cents": Sum("cents"), "least": Min(kind, kind), "most": Max(kind, kind)}, null_keys=True
        )
        for kind in VALUES
        if kind not in ("boolean", "numeric(12,2)")
    },
    "overall": State(aggregates={"cents": Sum("cents"), "always": Min("is_open", "boolean")}),
    "plain": State({"shop": "text"}, {"cents": Sum("cents", "numeric(12,2)")}, kind="non-transactional"),
    **{f"newest_{'_'.join(key)}": _newest(*key) for key in (["bigint"], ["text"], ["bigint", "text"])},
}


@pytest.fixture(params=["in the upsert", "by several processes"])
def either_way(request: pytest.FixtureRequest, settings: Settings, as_role: Execute, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are combined in the upsert, or before it in a table, by three processes."""
    if request.param == "by several processes":
        monkeypatch.setattr(combine_batches, "SHARED_ROWS", 0)
        as_role("postgres", f'ALTER DATABASE "{settings.pg_database}" SET max_parallel_workers_per_gather = 2')


@pytest.mark.promise("performance:ready-batches-are-merged-together", "performance:newest-rows-of-several-batches-are-found")
@pytest.mark.usefixtures("either_way")
def test_batches_together_leave_what_they_leave_one_by_one(store: StateStore, tally_of: TallyOf) -> None:
    draw = random.Random(1)

    def rows(state: StateSpec) -> list[Row]:
        def one(column: Any) -> Any:
            return None if column.nullable and draw.random() < 0.2 else draw.choice(VALUES[column.type.name])

        keys = dict.fromkeys(tuple(map(one, state.keys)) for _ in range(draw.randint(0, 30)))
        return [(*key, *map(one, state.values)) for key in keys]

    together = tally_of(_pipeline("together", **STATES))
    alone = tally_of(_pipeline("alone", **{f"{name}_alone": state for name, state in STATES.items()}))
    alone.plan(4)
    done: list[Commit] = []
    key_counts = []
    for txid in together.plan(4):
        partials = {state.name: rows(state) for state in together.spec.states}
        together.process_states(txid, partials)
        alone.process_states(txid, {f"{name}_alone": found for name, found in partials.items()})
        key_counts.append(alone.commit(txid).key_count)
        if txid == 2:
            done += store.commit_ready(together.spec, "test")
    done += store.commit_ready(together.spec, "test")

    assert [(commit.txid, commit.attempt, commit.key_count, commit.already_committed) for commit in done] == [
        (txid, 1, keys, False) for txid, keys in enumerate(key_counts, start=1)
    ]
    assert all(together.commit(txid).already_committed for txid in range(1, 5))
    for name in STATES:
        assert together.state(name) == alone.state(f"{name}_alone"), name


@pytest.mark.promise("performance:bigints-are-added-up-by-aggregate-of")
def test_several_batches_are_added_up_as_they_are_read(tally: Tally) -> None:
    tally.plan(2)
    tally.process(1, [("a", 2, 30, 10, 20)])
    tally.process(2, [("a", 1, 5, 5, 5)])

    steps = merge_steps(tally, lambda: tally.store.commit_ready(tally.spec, "test"))

    # Whether Postgres sorts before or after adding up is its own choice.
    kinds = sorted(step["Node Type"] for step in steps)
    assert kinds == ["Aggregate", "Append", "ModifyTable", "Seq Scan", "Seq Scan", "Sort"]
    (combined,) = (step["Output"] for step in steps if step["Node Type"] == "Aggregate")
    called = [output.removeprefix("CASE WHEN ").lstrip("(").partition("(")[0] for output in combined]
    assert called == ["per_shop_1_1.shop", "add_up", "add_up", "min", "max", "latest"]
    assert tally.state() == [("a", 3, 35, 5, 20, 2)]


SHOPS = 30_000  # enough for Postgres to let processes share them
DAYS = _pipeline("days", per_day_and_shop=State({"day": "date", "shop": "text"}, {"cents": Sum("cents")}, null_keys=True))
VISITS = _pipeline(
    "visits",
    per_visitor=State({"visitor": "bigint"}, {"visits": Count()}, null_keys=True),
    per_shop=State({"shop": "text"}, {"visits": Count()}),
)


@pytest.mark.promise("performance:from-million-rows-on-several-processes-add")
def test_every_key_is_in_one_part(
    settings: Settings, store: StateStore, tally_of: TallyOf, as_role: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(combine_batches, "SHARED_ROWS", 3 * (SHOPS + 1))
    as_role("postgres", f'ALTER DATABASE "{settings.pg_database}" SET max_parallel_workers_per_gather = 3')
    draw = random.Random(4)
    sold: dict[str | None, int] = {}
    days = tally_of(DAYS)
    for txid in days.plan(3):
        shops = [None, *(f"shop {number}" for number in draw.sample(range(2 * SHOPS), SHOPS))]
        days.process_states(txid, {"per_day_and_shop": [("2013-01-01", shop, txid) for shop in shops]})
        for shop in shops:
            sold[shop] = sold.get(shop, 0) + txid
    store.engine.dispose()  # connections from before the setting

    steps = merge_steps(days, lambda: store.commit_ready(DAYS.spec, "test"), "CREATE TABLE staging.per_day_and_shop")

    assert {shop: cents for _, shop, cents, _ in days.state("per_day_and_shop")} == sold
    adding = [step["Partial Mode"] for step in steps if step["Node Type"] == "Aggregate"]
    assert adding == ["Simple"] * 4
    assert [step["Node Type"] for step in steps if step["Parallel Aware"]] == ["Append"]
    assert as_role("postgres", "SELECT to_regclass('staging.per_day_and_shop_1_0')") == [(None,)]


@pytest.mark.promise("performance:rows-staged-in-order-of-only-key")
@pytest.mark.parametrize("processes", [1, 2])
def test_numbers_are_merged_in_their_order_and_texts_as_postgres_likes(
    settings: Settings, store: StateStore, tally_of: TallyOf, as_role: Execute, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr(combine_batches, "SHARED_ROWS", 0)
    as_role("postgres", f'ALTER DATABASE "{settings.pg_database}" SET max_parallel_workers_per_gather = {processes - 1}')
    visits = tally_of(VISITS)
    for txid in visits.plan(3):
        visitors = [(visitor, txid) for visitor in [*range(-300, 300), None]]
        visits.process_states(txid, {"per_visitor": visitors, "per_shop": [(f"shop {number}", txid) for number in range(60)]})
    store.engine.dispose()  # connections from before the setting
    merged: list[dict[str, Any]] = []

    def commit() -> None:
        merged.extend(merge_steps(visits, lambda: store.commit_ready(VISITS.spec, "test"), "staging.per_visitor_1_0 AS"))

    hashed = merge_steps(visits, commit, "staging.per_shop_1_0 AS")

    assert {row[1:] for state in ("per_visitor", "per_shop") for row in visits.state(state)} == {(1 + 2 + 3, 3)}
    sorts = [step["Node Type"] for step in merged if step["Node Type"] in ("Merge Append", "Sort")]
    assert sorts == ["Merge Append"] * processes + ["Sort"] * 3 * processes
    assert {step["Strategy"] for step in merged if step["Node Type"] == "Aggregate"} == {"Sorted"}
    assert merged[0]["Settings"].items() >= {"enable_hashagg": "off", "work_mem": f"{1024 * 1024 // 3 // processes}kB"}.items()
    assert not any(step["Node Type"] == "Merge Append" for step in hashed)
    assert "enable_hashagg" not in hashed[0]["Settings"]
    assert hashed[0]["Settings"]["work_mem"] == "256MB"


MONEY = _pipeline(
    "money",
    totals=State(
        {"shop": "text"}, {"cents": Sum("cents"), "few": Sum("cents", "integer"), "exact": Sum("cents", "numeric(4,2)")}
    ),
    all_totals=State(aggregates={"cents": Sum("cents", "numeric(4,2)")}, kind="non-transactional"),
)
# The mean and the variance have 8 digits before the point here.
MEANS = _pipeline(
    "means", mean_cents=State({"shop": "text"}, {"mean": Avg("cents", digits=30), "spread": Variance("cents", digits=30)})
)


def _money(cents: int = 0, few: int = 0, exact: str = "0") -> dict[str, list[Row]]:
    return {"totals": [("a", cents, few, exact)], "all_totals": [(exact,)]}


def _mean(total: str, count: int, squares: str) -> dict[str, list[Row]]:
    """Sum and count of the mean; sum, sum of squares and count of the variance."""
    return {"mean_cents": [("a", total, count, "0", squares, count)]}


# What is within the limit, what goes beyond it, and what would bring it back.
OVERFLOWS = {
    "bigint": (MONEY, _money(BIGINT_MAX), _money(1), _money(-1)),
    "bigint, downwards": (MONEY, _money(-BIGINT_MAX), _money(-2), _money(2)),
    "integer": (MONEY, _money(few=2**31 - 1), _money(few=1), _money(few=-1)),
    "numeric": (MONEY, _money(exact="99.99"), _money(exact="0.01"), _money(exact="-0.01")),
    "mean": (MEANS, _mean("40000000", 1, "0"), _mean("160000000", 1, "0"), _mean("0", 9, "0")),
    "variance": (MEANS, _mean("0", 1, "40000000"), _mean("0", 2, "360000000"), _mean("0", 9, "0")),
}


@pytest.mark.promise("I2", "error:OVERFLOW")
@pytest.mark.sampled(6)
@pytest.mark.parametrize("committed", [0, 1])
@pytest.mark.parametrize("case", OVERFLOWS)
def test_batches_that_overflow_one_by_one_are_not_merged_together(
    settings: Settings, store: StateStore, tally_of: TallyOf, monkeypatch: pytest.MonkeyPatch, case: str, committed: int
) -> None:
    pipeline, *batches = OVERFLOWS[case]
    money = tally_of(pipeline)
    for txid, rows in zip(money.plan(3), batches, strict=True):
        money.process_states(txid, rows)
    if committed:
        money.commit(1)
    for shared_rows in (combine_batches.SHARED_ROWS, 0):  # combined in the upsert, and before it in a table
        monkeypatch.setattr(combine_batches, "SHARED_ROWS", shared_rows)
        with refused(settings, PermanentError):
            store.commit_ready(pipeline.spec, "test")
    money.commit(1)
    with refused(settings, Overflow, rf"committing {pipeline.name} 2.*Widen the column's type"):
        money.commit(2)


@pytest.mark.promise("performance:bigints-are-added-up-by-aggregate-of")
def test_a_sum_that_is_out_of_range_on_the_way_is_in_range_one_by_one(tally: Tally, settings: Settings) -> None:
    tally.plan(3)
    tally.process(1, [("a", 1, -5, -5, -5)])
    tally.commit(1)
    tally.process(2, [("a", 1, BIGINT_MAX, 1, 1)])
    tally.process(3, [("a", 1, 3, 3, 3)])

    with refused(settings, Overflow, "bigint out of range"):
        tally.store.commit_ready(tally.spec, "test")

    tally.commit(2)
    tally.commit(3)
    assert tally.state() == [("a", 3, BIGINT_MAX - 2, -5, 3, 3)]


SWALLOW = (
    "CREATE FUNCTION state.swallow() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN IF NEW.shop = 'a' THEN RETURN NULL; END IF; RETURN NEW; END $$; "
    "CREATE TRIGGER swallow BEFORE {} ON state.per_shop FOR EACH ROW EXECUTE FUNCTION state.swallow()"
)


@pytest.mark.promise("I14")
def test_a_foreign_row_or_trigger_stops_all_batches(tally: Tally, settings: Settings, as_role: Execute) -> None:
    """Together or alone, no incomplete batch commits (I14)."""
    tally.plan(4)
    tally.process(1, [("a", 1, 1, 1, 1), ("b", 1, 1, 1, 1)])
    tally.commit(1)
    for txid in (2, 3):
        tally.process(txid, [("a", 1, 1, 1, 1), ("b", 1, 1, 1, 1)])
    tally.process(4, [("c", 1, 1, 1, 1)])
    for event in ("INSERT", "UPDATE"):
        as_role("postgres", SWALLOW.format(event))
        migrations.accept_table(tally.store.settings, "per_shop", "ann")
        with refused(settings, GuardMismatch, r"tally 2 to 3: 1 of 2 rows were not written into state\.per_shop"):
            tally.store.commit_ready(tally.spec, "test", max_batches=2)
        with refused(settings, GuardMismatch):
            tally.commit(2)
        as_role("postgres", "DROP FUNCTION state.swallow CASCADE; UPDATE tidegate.state_table SET accepted_shape = '{}'")

    foreign = "INSERT INTO state.per_shop VALUES ('c', 9, 9, 9, 9, 7)"
    as_role("tidegate_owner", f"SELECT set_config('tidegate.writer', 'tally', false); {foreign}")
    with refused(tally.store.settings, PermanentError):
        tally.store.commit_ready(tally.spec, "test")
    assert [tally.commit(txid).key_count for txid in (2, 3)] == [2, 2]
    with pytest.raises(GuardMismatch, match=r"1 of 1 rows of state\.per_shop"):
        tally.commit(4)


@pytest.mark.promise("limit:MAX_BATCHES_TOGETHER")
def test_no_more_than_the_limit_commit_together(tally: Tally) -> None:
    tally.spec = replace(tally.spec, window=MAX_BATCHES_TOGETHER + 1)
    for txid in tally.plan(MAX_BATCHES_TOGETHER + 1):
        tally.store.seal(tally.start(txid), [], Tracked(0))
    together = [len(tally.store.commit_ready(tally.spec, "test")) for _ in range(2)]
    assert together == [MAX_BATCHES_TOGETHER, 1]


def test_the_sequence_ends_at_the_first_batch_that_is_not_ready(tally: Tally, settings: Settings) -> None:
    def ready() -> list[int]:
        return [commit.txid for commit in tally.store.commit_ready(tally.spec, "test", wait=False)]

    assert ready() == []
    tally.plan(5)
    assert ready() == []
    for txid in (1, 2, 4, 5):
        tally.process(txid, [("a", 1, 1, 1, 1)])
    tally.start(3)
    with closing(psycopg2.connect(**settings.conninfo())) as other, other.cursor() as cursor:
        cursor.execute("SELECT FROM tidegate.cursor FOR UPDATE")
        start = time.monotonic()
        with pytest.raises(StoreUnavailable):
            ready()
        assert time.monotonic() - start < settings.lock_timeout_seconds
        other.rollback()  # closing alone would not wait until the server has released the lock
    assert ready() == [1, 2]
    assert ready() == []
    tally.process(3, [("a", 1, 1, 1, 1)], mode="restage")
    tally.store.halt_batch("tally", 5, "a person has to look")
    assert ready() == [3, 4]
    assert tally.state() == [("a", 4, 4, 1, 1, 4)]

    tally.plan(2, run_id="next")
    for txid in (6, 7):
        tally.process(txid, [("a", 1, 1, 1, 1)])
    tally.store.retry("tally", 5, "an operator", "it is well")
    tally.store.halt_batch("tally", 7, "a person has to look")
    assert tally.store.skip_batch(tally.spec, 7, "an operator", "no use") is None
    assert ready() == [5, 6]
    assert ready() == []
    assert tally.commit(7).skipped_reason == "no use"
    assert tally.state() == [("a", 6, 6, 1, 1, 6)]


@pytest.mark.promise("limit:MERGE_PATIENCE_FACTOR", "performance:ready-batch-waits-for-others-up-to", "decision:0005")
def test_a_ready_batch_waits_for_company_as_long_as_merges_take(tally: Tally, as_role: Execute) -> None:
    def opens() -> bool:
        return tally.store.turn("tally", 2).opens

    def last_merge_took(interval: str) -> None:
        as_role("tidegate_owner", f"UPDATE tidegate.commit SET merged_at = committed_at + interval '{interval}'")

    tally.plan(4)
    tally.process(1)
    assert tally.store.turn("tally", 1).opens, "there was no merge yet"
    tally.commit(1)
    last_merge_took("1 hour")
    assert not opens(), "it is not processed yet"
    tally.process(2)
    assert not opens(), "two more are on their way"
    last_merge_took("1 microsecond")
    assert opens(), "it has waited long enough"
    last_merge_took("1 hour")

    tally.process(4)
    assert not opens()
    begun = tally.start(3)
    assert not opens()
    tally.store.fail_attempt(begun, "SPARK_FAILED: it broke")
    assert opens(), "no task works on a failed batch"
    tally.start(3)
    assert not opens()
    tally.store.halt_batch("tally", 3, "a person has to look")
    assert opens()
    assert [commit.txid for commit in tally.store.commit_ready(tally.spec, "test")] == [2]


@pytest.mark.promise("fault:clocks-step-by-any-amount:commit", "limit:LONGEST_MERGE_WAIT_SECONDS")
def test_a_clock_that_steps_keeps_no_batch_waiting(tally: Tally, as_role: Execute) -> None:
    def opens(sealed_at: str, merged_at: str) -> bool:
        as_role("tidegate_owner", f"UPDATE tidegate.attempt SET sealed_at = now() + interval '{sealed_at}' WHERE txid = 2")
        as_role("tidegate_owner", f"UPDATE tidegate.commit SET merged_at = committed_at + interval '{merged_at}'")
        return tally.store.turn("tally", 2).opens

    tally.plan(3)
    tally.process(1)
    tally.commit(1)
    tally.process(2)

    assert not opens("-1 minute", "1 hour"), "it waits for company"
    assert opens("-4 minutes", "1 day"), "no merge takes that long"
    assert opens("1 day", "1 hour"), "it was sealed before the clock was set back"
    assert opens("-1 second", "-1 day")
    assert not opens("-1 minute", "1 hour")
    tally.spec = replace(tally.spec, window=1)
    tally.plan(1, run_id="with a smaller window")
    assert opens("-1 minute", "1 hour")


@pytest.mark.promise("performance:commit-reads-its-facts-in-one-statement")
def test_a_commit_asks_postgres_nine_times_and_many_at_once_little_more(
    store: StateStore, register: Callable[..., None]
) -> None:
    pipeline = replace(TALLY, states={"per_shop": TALLY.states["per_shop"]})
    register(pipeline)
    tally, spec = Tally(store, pipeline.spec), pipeline.spec
    files = [{"name": f"{n}.csv", "sha256": f"{n:064x}", "size": 1, "mtime_ns": 1, "inode": n} for n in range(15)]
    assert store.open_batches(spec, "run", [], None, [encode_metadata({"files": [file]}) for file in files]) is not None
    for txid in range(1, 16):
        tally.process_states(txid, {"per_shop": [("a", 1, 1, 1, 1)]}, source_rows=1)
    statements: list[str] = []
    sa.event.listen(store.engine, "before_cursor_execute", lambda _c, _cursor, statement, *_: statements.append(statement))

    store.commit_batch(spec, 1, "test")
    alone = len(statements)
    numbers = []
    for together in (2, 12):
        statements.clear()
        assert len(store.commit_ready(spec, "test", max_batches=together)) == together
        numbers.append(len(statements))

    assert alone <= 9
    assert numbers[0] == numbers[1] <= 12
    assert tally.state() == [("a", 15, 15, 1, 1, 15)]


@pytest.mark.promise("I12")
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_a_file_that_two_batches_list_counts_once(store: StateStore, register: Callable[..., None], together: bool) -> None:
    register(TALLY)
    tally = Tally(store)
    file = {"name": "1.csv", "sha256": f"{1:064x}", "size": 1, "mtime_ns": 1, "inode": 1}
    assert store.open_batches(tally.spec, "run", [], None, [encode_metadata({"files": [file]})] * 2) == [1, 2]
    for txid in (1, 2):
        tally.process(txid, [("a", 1, 1, 1, 1)])
    says = r"tally 2: 1\.csv has counted in txid 1, with the same content"
    if together:
        with pytest.raises(SourceChanged, match=says):
            store.commit_ready(tally.spec, "test", max_batches=2)
    tally.commit(1)
    with pytest.raises(SourceChanged, match=says):
        tally.commit(2)
    assert tally.state() == [("a", 1, 1, 1, 1, 1)]
