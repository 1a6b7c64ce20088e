"""Batches that wait for their commit are merged together, with the same result as one by one."""

import random
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.batches import Row
from tests.integration.conftest import BIGINT_MAX, ROW, TALLY, Tally, TallyOf, holding, listening, merge_steps, until
from tests.statements import execute
from tests.store import MAX_BATCHES_TOGETHER, StateSpec, combine_batches, encode_metadata, errors
from tidegate import migrations
from tidegate.jobs import Avg, Count, Files, Max, Min, Newest, Pipeline, State, Sum, Variance
from tidegate.state_store import Settings, StateStore

Share = Callable[[int, int], None]
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


def _extremes(kind: str) -> State:
    return State({"key": kind}, {"cents": Sum("cents"), "least": Min(kind, kind), "most": Max(kind, kind)}, null_keys=True)


STATES: dict[str, Any] = {
    **{f"per_{kind}": _extremes(kind) for kind in VALUES if kind not in ("boolean", "numeric(12,2)")},
    "overall": State(aggregates={"cents": Sum("cents"), "always": Min("is_open", "boolean")}),
    "plain": State({"shop": "text"}, {"cents": Sum("cents", "numeric(12,2)")}, kind="non-transactional"),
    **{f"newest_{'_'.join(key)}": _newest(*key) for key in (["bigint"], ["text"], ["bigint", "text"])},
}


@pytest.fixture
def share(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> Share:
    """A function that lets so many rows be combined before the upsert, in a table, by the session and so many workers."""

    def shared(rows: int, workers: int) -> None:
        monkeypatch.setattr(combine_batches, "SHARED_ROWS", rows)
        alter = f"ALTER DATABASE {store.settings.pg_database} SET max_parallel_workers_per_gather = {workers}"
        execute(store.settings.conninfo(user="postgres"), alter)
        store.engine.dispose()  # connections from before the setting

    return shared


@pytest.mark.promise("performance:ready-batches-are-merged-together", "performance:newest-rows-of-several-batches-are-found")
@pytest.mark.parametrize("is_shared", [False, True], ids=["in the upsert", "by several processes"])
def test_batches_together_leave_what_they_leave_one_by_one(tally_of: TallyOf, share: Share, is_shared: bool) -> None:
    draw = random.Random(1)
    if is_shared:
        share(0, 2)

    def rows(state: StateSpec) -> list[Row]:
        def one(column: Any) -> Any:
            return None if column.nullable and draw.random() < 0.2 else draw.choice(VALUES[column.type.name])

        keys = dict.fromkeys(tuple(map(one, state.keys)) for _ in range(draw.randint(0, 30)))
        return [(*key, *map(one, state.values)) for key in keys]

    together = tally_of(_pipeline("together", **STATES))
    alone = tally_of(_pipeline("alone", **{f"{name}_alone": state for name, state in STATES.items()}))
    alone.plan(4)
    done, expected = [], []
    for txid in together.plan(4):
        partials = {state.name: rows(state) for state in together.spec.states}
        together.process(txid, **partials)
        alone.process(txid, **{f"{name}_alone": found for name, found in partials.items()})
        expected.append((txid, 1, alone.commit(txid).key_count, False))
        if txid in (2, 4):
            done += together.store.commit_ready(together.spec, "test")

    assert [(commit.txid, commit.attempt, commit.key_count, commit.already_committed) for commit in done] == expected
    assert all(together.commit(txid).already_committed for txid in range(1, 5))
    for name in STATES:
        assert together.state(name) == alone.state(f"{name}_alone"), name


@pytest.mark.promise("performance:bigints-are-added-up-by-aggregate-of")
def test_several_batches_are_added_up_as_they_are_read(tally: Tally) -> None:
    tally.plan(2)
    tally.process(1, [("a", 2, 30, 10, 20)])
    tally.process(2, [("a", 1, 5, 5, 5)])
    steps = merge_steps(tally, tally.commit_ready)
    # Whether Postgres sorts before or after adding up is its own choice.
    assert sorted(step["Node Type"] for step in steps) == ["Aggregate", "Append", "ModifyTable", "Seq Scan", "Seq Scan", "Sort"]
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
def test_every_key_is_in_one_part(tally_of: TallyOf, share: Share) -> None:
    draw, days = random.Random(4), tally_of(DAYS)
    sold: Counter[str | None] = Counter()
    for txid in days.plan(3):
        shops = [None, *(f"shop {number}" for number in draw.sample(range(2 * SHOPS), SHOPS))]
        days.process(txid, per_day_and_shop=[("2013-01-01", shop, txid) for shop in shops])
        sold.update(dict.fromkeys(shops, txid))
    share(3 * (SHOPS + 1), 3)

    steps = merge_steps(days, days.commit_ready, "CREATE TABLE staging.per_day_and_shop")

    assert {shop: cents for _, shop, cents, _ in days.state("per_day_and_shop")} == sold
    assert [step["Partial Mode"] for step in steps if step["Node Type"] == "Aggregate"] == ["Simple"] * 4
    assert [step["Node Type"] for step in steps if step["Parallel Aware"]] == ["Append"]
    assert days.sql("SELECT to_regclass('staging.per_day_and_shop_1_0')") == [(None,)]


@pytest.mark.promise("performance:rows-staged-in-order-of-only-key")
@pytest.mark.parametrize("processes", [1, 2])
def test_numbers_are_merged_in_their_order_and_texts_as_postgres_likes(tally_of: TallyOf, share: Share, processes: int) -> None:
    visits = tally_of(VISITS)
    for txid in visits.plan(3):
        visitors = [(visitor, txid) for visitor in [*range(-300, 300), None]]
        visits.process(txid, per_visitor=visitors, per_shop=[(f"shop {number}", txid) for number in range(60)])
    share(0, processes - 1)
    merged: list[dict[str, Any]] = []
    merge = partial(merge_steps, visits, visits.commit_ready, "staging.per_visitor_1_0 AS")
    hashed = merge_steps(visits, lambda: merged.extend(merge()), "staging.per_shop_1_0 AS")

    assert {row[1:] for state in ("per_visitor", "per_shop") for row in visits.state(state)} == {(1 + 2 + 3, 3)}
    sorts = [step["Node Type"] for step in merged if step["Node Type"] in ("Merge Append", "Sort")]
    assert sorts == ["Merge Append"] * processes + ["Sort"] * 3 * processes
    assert {step["Strategy"] for step in merged if step["Node Type"] == "Aggregate"} == {"Sorted"}
    assert merged[0]["Settings"].items() >= {"enable_hashagg": "off", "work_mem": f"{1024 * 1024 // 3 // processes}kB"}.items()
    assert not any(step["Node Type"] == "Merge Append" for step in hashed)
    assert "enable_hashagg" not in hashed[0]["Settings"]
    assert hashed[0]["Settings"]["work_mem"] == "256MB"


SUMS = {"cents": Sum("cents"), "few": Sum("cents", "integer"), "exact": Sum("cents", "numeric(4,2)")}
ALL_TOTALS = State(aggregates={"cents": SUMS["exact"]}, kind="non-transactional")
MONEY = _pipeline("money", totals=State({"shop": "text"}, SUMS), all_totals=ALL_TOTALS)
# The mean and the variance have 8 digits before the point here.
EXACT = {"mean": Avg("cents", digits=30), "spread": Variance("cents", digits=30)}
MEANS = _pipeline("means", mean_cents=State({"shop": "text"}, EXACT))


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
@pytest.mark.parametrize("case", OVERFLOWS)
def test_batches_that_overflow_are_not_merged_together(tally_of: TallyOf, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    pipeline, *batches = OVERFLOWS[case]
    money = tally_of(pipeline)
    for txid, rows in zip(money.plan(3), batches, strict=True):
        money.process(txid, **rows)
    for committed in (0, 1):
        if committed:
            money.commit(1)
        for shared_rows in (combine_batches.SHARED_ROWS, 0):  # combined in the upsert, and before it in a table
            with monkeypatch.context() as patched:
                patched.setattr(combine_batches, "SHARED_ROWS", shared_rows)
                money.refuses(errors.PermanentError, "", money.commit_ready)
    money.refuses(errors.Overflow, rf"committing {pipeline.name} 2.*Widen the column's type", partial(money.commit, 2))


SWALLOW = (
    "CREATE FUNCTION state.swallow() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN IF NEW.shop = 'a' THEN RETURN NULL; END IF; RETURN NEW; END $$; "
    "CREATE TRIGGER swallow BEFORE {} ON state.per_shop FOR EACH ROW EXECUTE FUNCTION state.swallow()"
)


@pytest.mark.promise("I14")
def test_a_foreign_row_or_trigger_stops_all_batches(tally: Tally, settings: Settings) -> None:
    tally.having(4, 3, 1, shops=[("a", 1, 1, 1, 1), ("b", 1, 1, 1, 1)])
    tally.process(4, [("c", 1, 1, 1, 1)])
    for event in ("INSERT", "UPDATE"):
        tally.sql(SWALLOW.format(event), role="postgres")
        migrations.accept_table(settings, "per_shop", "ann")
        says = r"tally 2 to 3: 1 of 2 rows were not written into state\.per_shop"
        tally.refuses(errors.GuardMismatch, says, partial(tally.commit_ready, max_batches=2))
        tally.refuses(errors.GuardMismatch, "", partial(tally.commit, 2))
        tally.sql("DROP FUNCTION state.swallow CASCADE; UPDATE tidegate.state_table SET accepted_shape = '{}'", role="postgres")

    tally.sql("SET tidegate.writer = tally; INSERT INTO state.per_shop VALUES ('c', 9, 9, 9, 9, 7)")
    tally.refuses(errors.PermanentError, "", tally.commit_ready)
    assert [tally.commit(txid).key_count for txid in (2, 3)] == [2, 2]
    with pytest.raises(errors.GuardMismatch, match=r"1 of 1 rows of state\.per_shop"):
        tally.commit(4)


@pytest.mark.promise("limit:MAX_BATCHES_TOGETHER")
def test_no_more_than_the_limit_commit_together(tally: Tally) -> None:
    most = MAX_BATCHES_TOGETHER
    tally.spec = replace(tally.spec, window=most + 1)
    tally.seal_empty(*tally.plan(most + 1))
    assert [len(tally.commit_ready()) for _ in range(2)] == [most, 1]


def test_the_sequence_ends_at_the_first_batch_that_is_not_ready(tally: Tally, settings: Settings) -> None:
    ready = partial(tally.commit_ready, wait=False)
    assert ready() == []
    tally.plan(5)
    assert ready() == []
    for txid in (1, 2, 4, 5):
        tally.process(txid, ROW)
    tally.start(3)
    with holding(settings, "SELECT FROM tidegate.cursor FOR UPDATE"):
        start = time.monotonic()
        with pytest.raises(errors.StoreUnavailable):
            ready()
        assert time.monotonic() - start < settings.lock_timeout_seconds
    assert [ready(), ready()] == [[1, 2], []]
    tally.process(3, ROW, mode="restage")
    tally.store.halt_batch("tally", 5, "a person has to look")
    assert ready() == [3, 4]
    assert tally.state() == [("a", 4, 4, 1, 1, 4)]

    tally.plan(2, run_id="next")
    for txid in (6, 7):
        tally.process(txid, ROW)
    tally.store.retry("tally", 5, "an operator", "it is well")
    tally.store.halt_batch("tally", 7, "a person has to look")
    assert tally.store.skip_batch(tally.spec, 7, "an operator", "no use") is None
    assert [ready(), ready()] == [[5, 6], []]
    assert tally.commit(7).skipped_reason == "no use"
    assert tally.state() == [("a", 6, 6, 1, 1, 6)]


@pytest.mark.promise("I3")
def test_a_batch_that_is_processed_again_meanwhile_is_not_passed_over(tally: Tally, waiting: Callable[[], int]) -> None:
    """All have the same metadata, as replays of one record each have: the third continues the first as well."""
    tally.store.open_batches(tally.spec, "run", [], None, [encode_metadata({"files": []})] * 3)
    for txid in (1, 2, 3):
        tally.process(txid, ROW)
    committing = []

    def commit(*_: object) -> None:
        committing.append(threads.submit(tally.commit_ready))
        until(lambda: waiting() == 1)

    with ThreadPoolExecutor(1) as threads, listening(tally.store, "commit", commit, once=True):
        tally.start(2, mode="restage")
    assert committing[0].result() == [1]


@pytest.mark.promise("limit:MERGE_PATIENCE_FACTOR", "performance:ready-batch-waits-for-others-up-to", "decision:0005")
@pytest.mark.promise("fault:clocks-step-by-any-amount:commit", "limit:LONGEST_MERGE_WAIT_SECONDS")
def test_a_ready_batch_waits_for_company_as_long_as_merges_take(tally: Tally) -> None:
    """A clock that steps keeps no batch waiting."""

    def opens(last_merge_took: str = "1 hour", sealed_at: str | None = None) -> bool:
        if sealed_at:
            tally.sql(f"UPDATE tidegate.attempt SET sealed_at = now() + interval '{sealed_at}' WHERE txid = 2")
        tally.sql(f"UPDATE tidegate.commit SET merged_at = committed_at + interval '{last_merge_took}'")
        return tally.store.turn("tally", 2).opens

    tally.plan(4)
    tally.process(1)
    assert tally.store.turn("tally", 1).opens, "there was no merge yet"
    tally.commit(1)
    assert not opens(), "it is not processed yet"
    tally.process(2)
    assert not opens(), "two more are on their way"
    assert opens("1 microsecond"), "it has waited long enough"
    assert opens("1 day", "-4 minutes"), "no merge takes that long"
    assert opens("1 hour", "1 day"), "it was sealed before the clock was set back"
    assert opens("-1 day", "-1 second")
    for window, is_full in ((1, True), (4, False)):
        tally.sql("UPDATE tidegate.pipeline SET in_flight = %s", [window])
        assert opens("1 hour", "-1 minute") is is_full

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
    assert tally.commit_ready() == [2]


@pytest.mark.promise("performance:commit-reads-its-facts-in-one-statement")
def test_a_commit_asks_postgres_nine_times_and_many_at_once_little_more(tally_of: TallyOf) -> None:
    tally = tally_of(replace(TALLY, states={"per_shop": TALLY.states["per_shop"]}))
    plan_files(tally, *range(15))
    for txid in range(1, 16):
        tally.process(txid, per_shop=ROW)
    statements: list[str] = []
    numbers = []
    with listening(tally.store, "before_cursor_execute", lambda _c, _cursor, statement, *_: statements.append(statement)):
        for commit in (partial(tally.commit, 1), *(partial(tally.commit_ready, max_batches=most) for most in (2, 12))):
            statements.clear()
            commit()
            numbers.append(len(statements))
    alone, two, twelve = numbers
    assert alone <= 9
    assert two == twelve <= 12
    assert tally.state() == [("a", 15, 15, 1, 1, 15)]


def plan_files(tally: Tally, *files: int) -> None:
    found = [{"name": f"{n}.csv", "sha256": f"{n:064x}", "size": 1, "mtime_ns": 1, "inode": n} for n in files]
    tally.store.open_batches(tally.spec, "run", [], None, [encode_metadata({"files": [file]}) for file in found])


@pytest.mark.promise("I12")
def test_a_file_that_two_batches_list_counts_once(tally: Tally) -> None:
    plan_files(tally, 1, 1)
    for txid in (1, 2):
        tally.process(txid, ROW)
    says = r"tally 2: 1\.csv has counted in txid 1, with the same content"
    tally.refuses(errors.SourceChanged, says, partial(tally.commit_ready, max_batches=2))
    tally.commit(1)
    tally.refuses(errors.SourceChanged, says, partial(tally.commit, 2))
    tally.store.halt_batch("tally", 2, says)
    assert tally.store.skip_batch(tally.spec, 2, "an operator", "as the message says").skipped_reason
