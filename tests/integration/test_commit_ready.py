"""Batches that wait for their commit are merged together, with the same result as one by one."""

import random
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa

from tests.integration.conftest import BIGINT_MAX, TALLY, Execute, Row, Tally, TallyOf, contents, merge_steps
from tests.store import Commit, Tracked, combine_batches, encode_metadata
from tidegate import migrations
from tidegate.jobs import Avg, Check, Count, Files, Max, Min, Newest, Pipeline, Rows, State, Sum, Variance
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import GuardMismatch, Overflow, PermanentError, SourceChanged, StoreUnavailable

KINDS = Pipeline(
    name="kinds",
    source=Files("kinds", glob="*.csv", format="csv", schema={"shop": "string", "is_open": "boolean", "cents": "int"}),
    states={
        "maybe_shop": State(
            key={"shop": "text"},
            aggregates={"cents": Sum("cents"), "first": Min("shop", "text"), "ever": Max("is_open", "boolean")},
            null_keys=True,
        ),
        "overall": State(aggregates={"cents": Sum("cents"), "always": Min("is_open", "boolean")}),
        "plain": State(key={"shop": "text"}, aggregates={"cents": Sum("cents", "numeric(12,2)")}, kind="non-transactional"),
    },
    guarantee="at_least_once",
)


DAYS = Pipeline(
    name="days",
    source=Files("days", glob="*.csv", format="csv", schema={"day": "date", "shop": "string", "cents": "int"}),
    states={"per_day_and_shop": State(key={"day": "date", "shop": "text"}, aggregates={"cents": Sum("cents")}, null_keys=True)},
)


VISITS = Pipeline(
    name="visits",
    source=Files("visits", glob="*.csv", format="csv", schema={"visitor": "int", "shop": "string"}),
    states={
        "per_visitor": State(key={"visitor": "bigint"}, aggregates={"visits": Count()}, null_keys=True),
        "per_shop": State(key={"shop": "text"}, aggregates={"visits": Count()}),
    },
)


@pytest.fixture(params=["in the upsert", "by several processes"])
def either_way(request: pytest.FixtureRequest, settings: Settings, as_role: Execute, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are combined in the upsert, or before it in a table, by three processes."""
    if request.param == "by several processes":
        monkeypatch.setattr(combine_batches, "SHARED_ROWS", 0)
        as_role("postgres", f'ALTER DATABASE "{settings.pg_database}" SET max_parallel_workers_per_gather = 2')


@pytest.mark.promise("performance:ready-batches-are-merged-together")
@pytest.mark.sampled(3)
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("seed", range(5))
def test_any_batches_in_any_grouping(store: StateStore, tally_of: TallyOf, seed: int) -> None:
    draw = random.Random(seed)
    kinds = tally_of(KINDS)
    kinds.plan(12)
    model: list[dict[str, list[Row]]] = []
    done: list[Commit] = []
    for txid in range(1, 13):
        rows = _partials(draw)
        model.append(rows)
        kinds.process_states(txid, rows)
        if draw.random() < 0.3:
            done.append(kinds.commit(store.committed("kinds") + 1))
        elif draw.random() < 0.3:
            done += store.commit_ready(KINDS.spec, "test")
    while store.committed("kinds") < 12:
        together = store.commit_ready(KINDS.spec, "test", max_batches=draw.randint(1, 4))
        assert together
        done += together
    assert [(commit.txid, commit.attempt, commit.key_count, commit.already_committed) for commit in done] == [
        (txid, 1, sum(map(len, rows.values())), False) for txid, rows in enumerate(model, start=1)
    ]
    assert all(kinds.commit(txid).already_committed for txid in range(1, 13))
    for state in ("maybe_shop", "overall", "plain"):
        assert _comparable(kinds.state(state)) == _comparable(_folded(state, model))


# Values of each type, in their order; of dates also those that Python cannot represent.
TYPED: dict[str, list[str]] = {
    "uuid": [str(uuid.UUID(int=number * 2**123)) for number in range(20)],
    "timestamp": [f"{1 + number * 450:04d}-01-31 02:30:00.00000{number % 9 + 1}" for number in range(20)],
    "bytea": sorted(f"\\x{'ff' * (number % 4)}{number:02x}" for number in range(20)),
    "date": ["-infinity", "0044-03-15 BC", "2013-01-01", *(f"{year}-12-31" for year in range(11000, 11016)), "infinity"],
    "timestamptz": ["-infinity", "0044-03-15 00:00:00+00 BC", *(f"{year}-12-31 00:00:00+00" for year in range(11000, 11017))],
}
ODD_TYPES = Pipeline(
    name="odd_types",
    source=Files("odd", glob="*.csv", format="csv", schema=dict.fromkeys(TYPED, "string")),
    states={
        f"per_{key}": State(
            key={"key": key},
            aggregates={f"{which.__name__.lower()}_{kind}": which(kind, kind) for kind in TYPED for which in (Min, Max)},
            null_keys=True,
        )
        for key in TYPED
    },
)


@pytest.mark.soak
@pytest.mark.usefixtures("either_way")
def test_values_of_types_that_python_reads_otherwise_are_merged_together(
    store: StateStore, tally_of: TallyOf, as_role: Execute
) -> None:
    """As keys that are divided among processes, and as the min and max of all batches, NULLs among them."""
    draw = random.Random(1)
    expected: dict[str, dict[str | None, list[Any]]] = {key: {} for key in TYPED}

    def drawn(kind: str) -> str | None:
        return draw.choice(TYPED[kind]) if draw.random() < 0.9 else None

    odd = tally_of(ODD_TYPES)
    for txid in odd.plan(3):
        partials = {}
        for kind, groups in expected.items():
            rows = [[key, *(drawn(value) for value in TYPED for _ in "<>")] for key in {drawn(kind) for _ in range(30)}]
            partials[f"per_{kind}"] = rows
            for key, *values in rows:
                groups.setdefault(key, []).append(values)
        odd.process_states(txid, partials)
    assert len(store.commit_ready(ODD_TYPES.spec, "test")) == 3
    for kind, groups in expected.items():
        columns = [f"{which}_{value}::text" for value in TYPED for which in ("min", "max")]
        found = as_role("postgres", f"SET TimeZone = 'UTC'; SELECT key::text, {', '.join(columns)} FROM state.per_{kind}")
        assert {key: values for key, *values in found} == {
            key: [
                (min if place % 2 == 0 else max)(known, key=TYPED[value].index) if known else None
                for place, value in enumerate(value for value in TYPED for _ in "<>")
                for known in [[row[place] for row in rows if row[place] is not None]]
            ]
            for key, rows in groups.items()
        }


VERSIONS = Pipeline(
    name="versions",
    source=Files("versions", glob="*.csv", format="csv", schema={"number": "int", "shop": "string", "at": "bigint"}),
    states={
        name: Newest(key, {"label": "text"}, {"at": "bigint"}, null_keys=name == "per_maybe")
        for name, key in {
            "per_number": {"number": "bigint"},
            "per_shop": {"shop": "text"},
            "per_both": {"number": "bigint", "shop": "text"},
            "per_maybe": {"shop": "text"},
        }.items()
    },
)


@pytest.mark.promise("performance:newest-rows-of-several-batches-are-found")
@pytest.mark.usefixtures("either_way")
def test_the_newest_row_of_several_batches_is_kept_with_the_last_txid_of_its_key(store: StateStore, tally_of: TallyOf) -> None:
    draw = random.Random(3)
    kept: dict[str, dict[Row, tuple[Any, int]]] = {state: {} for state in VERSIONS.states}
    versions = tally_of(VERSIONS)
    versions.plan(6)
    for txid in range(1, 7):
        partials = {}
        for state, newest in kept.items():
            names = [key.name for key in versions.spec.state(state).keys]  # type: ignore[union-attr]
            numbers = draw.sample(range(60), 30)
            keys = [tuple(number if name == "number" else f"shop {number % 9}" for name in names) for number in numbers]
            keys += [(None,)] if state == "per_maybe" else []
            rows = [[*key, draw.choice([None, 1, 2, 3]), draw.choice([None, "a", "b"])] for key in dict.fromkeys(keys)]
            partials[state] = rows
            for *key, at, label in rows:
                before = newest.get(tuple(key), ((None, None), 0))[0]
                newest[tuple(key)] = (max(before, (at, label), key=_rank), txid)
        versions.process_states(txid, partials)
    assert len(store.commit_ready(VERSIONS.spec, "test", max_batches=2)) == 2
    assert len(store.commit_ready(VERSIONS.spec, "test")) == 4
    for state, newest in kept.items():
        width = len(versions.spec.state(state).keys)  # type: ignore[union-attr]
        found = {row[:width]: (row[width:-1], row[-1]) for row in versions.state(state)}
        assert found == newest, state


def _rank(row: Row) -> list[tuple[bool, Any]]:
    """Return what a version is compared by: NULL comes before every value."""
    return [(False, 0) if value is None else (True, value) for value in row]


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
    assert [output.removeprefix("CASE WHEN ").lstrip("(").partition("(")[0] for output in combined] == [
        "per_shop_1_1.shop",
        "add_up",
        "add_up",
        "min",
        "max",
        "latest",
    ]
    assert tally.state() == [("a", 3, 35, 5, 20, 2)]


SHOPS = 30_000  # enough for Postgres to let processes share them


@pytest.mark.promise("performance:from-million-rows-on-several-processes-add")
@pytest.mark.parametrize("processes", [1, 4])
def test_every_key_is_in_one_part(
    settings: Settings, register: Callable[..., None], as_role: Execute, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr(combine_batches, "SHARED_ROWS", 3 * (SHOPS + 1))
    as_role("postgres", f'ALTER DATABASE "{settings.pg_database}" SET max_parallel_workers_per_gather = {processes - 1}')
    register(DAYS)
    draw = random.Random(processes)
    sold: dict[str | None, int] = {}
    with StateStore.connect(settings) as store:
        days = Tally(store, DAYS.spec)
        for txid in days.plan(3):
            shops = [None, *(f"shop {number}" for number in draw.sample(range(2 * SHOPS), SHOPS))]
            days.process_states(txid, {"per_day_and_shop": [("2013-01-01", shop, txid) for shop in shops]})
            for shop in shops:
                sold[shop] = sold.get(shop, 0) + txid

        steps = merge_steps(days, lambda: store.commit_ready(DAYS.spec, "test"), "CREATE TABLE staging.per_day_and_shop")

        assert {shop: cents for _, shop, cents, _ in days.state("per_day_and_shop")} == sold
    adding = [step["Partial Mode"] for step in steps if step["Node Type"] == "Aggregate"]
    assert adding == ["Simple"] * processes
    assert [step["Node Type"] for step in steps if step["Parallel Aware"]] == (["Append"] if processes > 1 else [])
    gone = as_role("postgres", "SELECT to_regclass('staging.per_day_and_shop_1_0')")
    assert gone == [(None,)]


@pytest.mark.promise("performance:rows-staged-in-order-of-only-key")
@pytest.mark.parametrize(("processes", "are_in_order"), [(1, True), (2, False)])
def test_numbers_are_merged_in_their_order_and_texts_as_postgres_likes(
    settings: Settings,
    register: Callable[..., None],
    as_role: Execute,
    monkeypatch: pytest.MonkeyPatch,
    processes: int,
    are_in_order: bool,
) -> None:
    monkeypatch.setattr(combine_batches, "SHARED_ROWS", 0)
    as_role("postgres", f'ALTER DATABASE "{settings.pg_database}" SET max_parallel_workers_per_gather = {processes - 1}')
    register(VISITS)
    draw = random.Random(processes)
    expected: dict[object, list[int]] = {}  # of each visitor and shop: how many visits, and the last txid
    with StateStore.connect(settings) as store:
        visits = Tally(store, VISITS.spec)
        visits.plan(3)
        for txid in (1, 2, 3):
            visitors = [*sorted(draw.sample(range(-500, 500), 600)), None]
            shops = [f"shop {number}" for number in draw.sample(range(100), 60)]
            if not are_in_order:
                draw.shuffle(visitors)
            brought = {"per_visitor": [(visitor, txid) for visitor in visitors], "per_shop": [(shop, txid) for shop in shops]}
            visits.process_states(txid, brought)
            for key in (*visitors, *shops):
                expected[key] = [expected.get(key, [0])[0] + txid, txid]

        merged: list[dict[str, Any]] = []

        def commit() -> None:
            merged.extend(merge_steps(visits, lambda: store.commit_ready(VISITS.spec, "test"), "staging.per_visitor_1_0 AS"))

        hashed = merge_steps(visits, commit, "staging.per_shop_1_0 AS")

        assert {key: row for state in ("per_visitor", "per_shop") for key, *row in visits.state(state)} == expected
    sorts = [step["Node Type"] for step in merged if step["Node Type"] in ("Merge Append", "Sort")]
    assert sorts == ["Merge Append"] * processes + ["Sort"] * 3 * processes
    assert {step["Strategy"] for step in merged if step["Node Type"] == "Aggregate"} == {"Sorted"}
    assert merged[0]["Settings"].items() >= {"enable_hashagg": "off", "work_mem": f"{1024 * 1024 // 3 // processes}kB"}.items()
    assert not any(step["Node Type"] == "Merge Append" for step in hashed)
    assert "enable_hashagg" not in hashed[0]["Settings"]
    assert hashed[0]["Settings"]["work_mem"] == "256MB"


MONEY = Pipeline(
    name="money",
    source=Files("money", glob="*.csv", format="csv", schema={"shop": "string", "cents": "int"}),
    states={
        "totals": State(
            key={"shop": "text"},
            aggregates={"cents": Sum("cents"), "few": Sum("cents", "integer"), "exact": Sum("cents", "numeric(4,2)")},
        ),
        "all_totals": State(aggregates={"cents": Sum("cents", "numeric(4,2)")}, kind="non-transactional"),
    },
    guarantee="at_least_once",
)
ZERO = (0, 0, "0")
AT_THE_LIMIT = {
    "bigint": ((BIGINT_MAX, 0, "0"), (1, 0, "0"), (-1, 0, "0")),
    "bigint, downwards": ((-BIGINT_MAX, 0, "0"), (-2, 0, "0"), (2, 0, "0")),
    "integer": ((0, 2**31 - 1, "0"), (0, 1, "0"), (0, -1, "0")),
    "numeric": ((0, 0, "99.99"), (0, 0, "0.01"), (0, 0, "-0.01")),
}


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("is_first_committed", [True, False])
@pytest.mark.parametrize(("first", "beyond", "back"), AT_THE_LIMIT.values(), ids=AT_THE_LIMIT)
def test_batches_that_overflow_one_by_one_are_not_merged_together(
    settings: Settings, store: StateStore, tally_of: TallyOf, first: Row, beyond: Row, back: Row, *, is_first_committed: bool
) -> None:
    money = tally_of(MONEY)
    money.plan(3)
    for txid, row in enumerate((first, beyond, back), start=1):
        money.process_states(txid, {"totals": [("a", *row)], "all_totals": [(row[2],)]})
    if is_first_committed:
        money.commit(1)
    before = contents(settings)

    with pytest.raises(PermanentError):
        store.commit_ready(MONEY.spec, "test")

    assert contents(settings) == before
    if not is_first_committed:
        money.commit(1)
    with pytest.raises(Overflow):
        money.commit(2)


MEANS = Pipeline(
    name="means",
    source=Files("means", glob="*.csv", format="csv", schema={"shop": "string", "cents": "int"}),
    states={"mean_cents": State({"shop": "text"}, {"mean": Avg("cents", digits=30), "spread": Variance("cents", digits=30)})},
)
# Sum and count of the mean; sum, sum of squares and count of the variance.
NOTHING = ("0", 1, "0", "0", 1)


def test_sums_far_from_the_limit_are_merged_together(store: StateStore, tally_of: TallyOf) -> None:
    rows = [("a", 2**62 - 3, 2**30 - 3, "49.98"), ("a", 1, 1, "0.01"), ("a", -1, -1, "-0.01")]
    money = tally_of(MONEY)
    for txid, row in zip(money.plan(3), rows, strict=True):
        money.process_states(txid, {"totals": [row]})
    assert [commit.txid for commit in store.commit_ready(MONEY.spec, "test")] == [1, 2, 3]


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        (("40000000", 1, "0", "0", 1), ("160000000", 1, "0", "0", 1)),
        (("0", 1, "0", "40000000", 1), ("0", 2, "0", "360000000", 2)),
    ],
    ids=["mean", "variance"],
)
def test_batches_whose_derived_values_overflow_one_by_one_are_not_merged_together(
    store: StateStore, tally_of: TallyOf, within: Row, beyond: Row, *, is_kept: bool
) -> None:
    """A later batch would bring the mean or the variance back into its range, which has 8 digits before the point here."""
    means = tally_of(MEANS)
    means.plan(4)
    for txid, row in enumerate((NOTHING, within, beyond, ("0", 9, "0", "0", 9)), start=1):
        key = "a" if is_kept or txid > 2 else "another"
        means.process_states(txid, {"mean_cents": [(key, *row)]})
    assert [commit.txid for commit in store.commit_ready(MEANS.spec, "test", max_batches=2)] == [1, 2]

    with pytest.raises(PermanentError):
        store.commit_ready(MEANS.spec, "test")
    with pytest.raises(Overflow):
        means.commit(3)
    assert store.committed("means") == 2


@pytest.mark.promise("performance:bigints-are-added-up-by-aggregate-of")
def test_a_sum_that_is_out_of_range_on_the_way_is_in_range_one_by_one(tally: Tally, settings: Settings) -> None:
    tally.plan(3)
    tally.process(1, [("a", 1, -5, -5, -5)])
    tally.commit(1)
    tally.process(2, [("a", 1, BIGINT_MAX, 1, 1)])
    tally.process(3, [("a", 1, 3, 3, 3)])
    before = contents(settings)

    with pytest.raises(Overflow, match="bigint out of range"):
        tally.store.commit_ready(tally.spec, "test")
    assert contents(settings) == before

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
    """Together or alone, no incomplete batch commits (I14).

    A row with a later txid is never overwritten, nor is its update dropped.
    """
    tally.plan(4)
    tally.process(1, [("a", 1, 1, 1, 1), ("b", 1, 1, 1, 1)])
    tally.commit(1)
    for txid in (2, 3):
        tally.process(txid, [("a", 1, 1, 1, 1), ("b", 1, 1, 1, 1)])
    tally.process(4, [("c", 1, 1, 1, 1)])
    for event in ("INSERT", "UPDATE"):
        as_role("postgres", SWALLOW.format(event))
        migrations.accept_table(tally.store.settings, "per_shop", "ann")
        before = contents(tally.store.settings)
        with pytest.raises(GuardMismatch, match=r"tally 2 to 3: 1 of 2 rows were not written into state\.per_shop"):
            tally.store.commit_ready(tally.spec, "test", max_batches=2)
        with pytest.raises(GuardMismatch):
            tally.commit(2)
        assert contents(tally.store.settings) == before
        as_role("postgres", "DROP FUNCTION state.swallow CASCADE; UPDATE tidegate.state_table SET accepted_shape = '{}'")

    foreign = "INSERT INTO state.per_shop VALUES ('c', 9, 9, 9, 9, 7)"
    as_role("tidegate_owner", f"SELECT set_config('tidegate.writer', 'tally', false); {foreign}")
    before = contents(tally.store.settings)
    with pytest.raises(PermanentError):
        tally.store.commit_ready(tally.spec, "test")
    assert contents(tally.store.settings) == before
    assert [tally.commit(txid).key_count for txid in (2, 3)] == [2, 2]
    with pytest.raises(GuardMismatch, match=r"1 of 1 rows of state\.per_shop"):
        tally.commit(4)


def test_a_batch_can_be_sealed_while_those_before_it_are_merged(
    tally: Tally, settings: Settings, waiting: Callable[[], int]
) -> None:
    """A merge of large batches is slow; a task that seals the next batch must not wait for it."""
    tally.plan(2)
    tally.process(1, [("a", 1, 1, 1, 1)])
    with (
        closing(psycopg2.connect(**settings.conninfo(user="postgres"))) as holder,
        holder.cursor() as cursor,
        StateStore.connect(replace(settings, lock_timeout_seconds=1)) as hasty,
        ThreadPoolExecutor() as pool,
    ):
        cursor.execute("LOCK TABLE tidegate.commit IN SHARE MODE")
        merging = pool.submit(tally.store.commit_ready, tally.spec, "test")
        while not waiting():
            assert not merging.done()
        Tally(hasty, tally.spec).process(2, [("b", 1, 1, 1, 1)])
        holder.rollback()
        assert [c.txid for c in merging.result()] == [1]
    assert [c.txid for c in tally.store.commit_ready(tally.spec, "test")] == [2]


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


def test_opaque_states_are_committed_one_by_one(store: StateStore, tally_of: TallyOf) -> None:
    """Each row has to keep its value from before its last txid."""
    opaque = replace(TALLY, states={name: replace(state, kind="opaque") for name, state in TALLY.states.items()})
    tally = tally_of(opaque)
    tally.plan(2)
    tally.process(1, [("a", 1, 1, 1, 1)])
    tally.process(2, [("a", 1, 1, 1, 1)])
    assert [c.txid for c in store.commit_ready(opaque.spec, "test")] == [1]
    assert [c.txid for c in store.commit_ready(opaque.spec, "test")] == [2]


@pytest.mark.promise("fault:one-postgres-backend-or-server-dies:commit")
def test_a_connection_that_breaks_leaves_all_or_nothing(tally: Tally, settings: Settings) -> None:
    tally.plan(3)
    for txid in (1, 2, 3):
        tally.process(txid, [("a", 1, 1, 1, 1)])
    killer = psycopg2.connect(**settings.conninfo(user="postgres"))
    killer.autocommit = True
    with killer.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION state.stop() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$; "
            "CREATE TRIGGER stop AFTER INSERT ON state.per_shop EXECUTE FUNCTION state.stop()"
        )
        migrations.accept_table(settings, "per_shop", "ann")
        with pytest.raises(Exception, match="Postgres"):
            tally.store.commit_ready(tally.spec, "test")
        cursor.execute("ALTER TABLE state.per_shop DISABLE TRIGGER stop")
        cursor.execute("UPDATE tidegate.state_table SET accepted_shape = '{}'")
    killer.close()
    assert tally.store.committed("tally") == 0
    assert [c.txid for c in tally.store.commit_ready(tally.spec, "test")] == [1, 2, 3]
    assert tally.state() == [("a", 3, 3, 1, 1, 3)]


def _partials(draw: random.Random) -> dict[str, list[Row]]:
    shops: Sequence[str | None] = draw.sample([None, "", "a", "b", "c", "ä"], draw.randint(0, 6))

    def cents() -> int:
        return draw.randint(-5, 5)

    def maybe(value: object) -> object:
        return value if draw.random() < 0.7 else None

    is_open = [maybe(draw.random() < 0.5) for _ in shops]
    return {
        "maybe_shop": [(shop, cents(), maybe(draw.choice("xyz")), ever) for shop, ever in zip(shops, is_open, strict=True)],
        "overall": [(cents(), maybe(draw.random() < 0.5))] if shops else [],
        "plain": [(shop, f"{cents()}.25") for shop in shops if shop is not None],
    }


def _total(values: Sequence[Any]) -> float:
    return sum(map(float, values))


# Of each state: how many columns its key has, and the rules of the others.
RULES: dict[str, tuple[int, Sequence[Callable[..., Any]]]] = {
    "maybe_shop": (1, [_total, min, max]),
    "overall": (0, [_total, min]),
    "plain": (1, [_total]),
}


def _folded(state: str, model: Sequence[dict[str, list[Row]]]) -> list[tuple]:
    width, rules = RULES[state]
    groups: dict[Row, list[Row]] = {}
    for txid, rows in enumerate(model, start=1):
        for row in rows[state]:
            groups.setdefault(tuple(row[:width]), []).append([*row[width:], txid])
    merged = []
    for key, values in groups.items():
        known = [[value for value in column if value is not None] for column in zip(*values, strict=True)]
        last = [] if state == "plain" else [known[-1][-1]]
        merged.append((*key, *(rule(of) if of else None for rule, of in zip(rules, known, strict=False)), *last))
    return merged


def _comparable(rows: Sequence[tuple]) -> list[str]:
    return sorted(str([float(v) if type(v) in (int, Decimal) else v for v in row]) for row in rows)


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


@pytest.mark.parametrize(
    ("pipeline", "waits"),
    [
        (replace(TALLY, states={"per_shop": replace(TALLY.states["per_shop"], kind="opaque")}), False),
        (replace(TALLY, checks={"any": Check(lambda batch: sa.select(batch.state("per_shop")), otherwise="warn")}), False),
        (replace(TALLY, states={"per_shop": Rows({"shop": "text"})}), True),
    ],
    ids=["opaque", "checked", "appended"],
)
def test_only_a_batch_that_may_be_merged_with_others_waits_for_them(
    pipeline: Pipeline, waits: bool, store: StateStore, tally_of: TallyOf, as_role: Execute
) -> None:
    """Where each batch commits alone, waiting would gain nothing."""
    as_role("tidegate_owner", f"UPDATE tidegate.pipeline SET commits_alone = {waits}")
    tally = tally_of(pipeline)
    tally.plan(3)
    for txid in (1, 2):
        store.seal(tally.start(txid), [], Tracked(0))
    tally.commit(1)
    as_role("tidegate_owner", "UPDATE tidegate.commit SET merged_at = committed_at + interval '1 hour'")

    assert store.turn("tally", 2).opens is not waits


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
