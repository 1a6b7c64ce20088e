"""Rebuilds of each kind of state, compared with a pipeline that was declared so from the beginning; what is refused."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests import steps
from tests.sources.in_process import counted_here
from tests.steps import plan, redo
from tests.store import (
    HOME_VARIABLE,
    LedgerReader,
    Mend,
    PipelineSpec,
    Request,
    StateReader,
    range_partitions,
    rebuilds,
    version_of,
)
from tidegate import migrations
from tidegate.jobs import (
    Check,
    Count,
    Files,
    History,
    Inputs,
    Max,
    Newest,
    Pipeline,
    Ranges,
    Rows,
    Session,
    State,
    StateQuery,
    Sum,
    Tumbling,
    Update,
)
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import (
    CheckFailed,
    DeclarationChanged,
    PipelineRetired,
    RangeRefused,
    TidegateError,
)

__all__ = ["counted_here"]  # a fixture

numbers = iter(range(1, 1_000_000))
SCHEMA = {"at": "timestamp", "shop": "string", "cents": "int"}
COUNTED = {"sold": Count()}
SUMMED = {"sold": Count(), "cents": Sum("cents", "bigint"), "dearest": Max("cents", "integer")}
BY_SHOP = {"shop": "text"}
CHANGED = {"by_shop": State(key=BY_SHOP, aggregates=SUMMED)}


def sales(version: int = 1, **changed: Any) -> Pipeline:
    usual: dict[str, Any] = {
        "source": Files("sales", glob="*.csv", format="csv", schema=SCHEMA, max_files=1),
        "states": {"by_shop": State(key=BY_SHOP, aggregates=COUNTED)},
        "tries": 1,
    }
    return Pipeline("inbox", version=version, **usual | changed)


@pytest.fixture(autouse=True)
def sold(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(settings.home))
    (settings.home / "pipelines").mkdir()
    for day in (1, 2):
        sell(settings, day, (9, "Lisbon", 100 * day), (10, "Porto", 7), (11, "Porto", day - 2))


def sell(settings: Settings, day: int, *rows: tuple[int, str, Any]) -> Path:
    file = settings.home / f"sales/{day:02d}.csv"
    file.parent.mkdir(exist_ok=True)
    lines = [f"2026-01-{day:02d}T{hour:02d}:00:00Z,{shop},{cents}" for hour, shop, cents in rows]
    file.write_text("\n".join(["at,shop,cents", *lines, ""]))
    return file


def run(settings: Settings, pipeline: Pipeline) -> list[int]:
    txids = plan(settings, pipeline, run_id=f"run {next(numbers)}")
    steps.complete(settings, pipeline, *txids)
    return txids


def rebuilt(settings: Settings, pipeline: Pipeline) -> list[int]:
    txids: list[int] = []
    with StateStore.connect(settings, user=settings.pg_owner) as owner:
        while (progress := owner.begin_rebuild(pipeline.spec)).rebuilt < progress.committed:
            txids += run(settings, pipeline.rebuild())
    return txids


def migrate(settings: Settings, pipeline: Pipeline) -> None:
    migrations.new_revision(settings, [pipeline.spec], "changed")
    assert migrations.upgrade(settings, [pipeline.spec])[1] == [pipeline.name]


def from_the_beginning(settings: Settings, register: Callable[..., None], pipeline: Pipeline) -> None:
    """Run a pipeline of the same declaration and other names from the beginning."""
    clean = replace(pipeline, name="clean", states={f"clean_{name}": state for name, state in pipeline.states.items()})
    register(clean)
    run(settings, clean)


def content(settings: Settings, table: str) -> list[str]:
    with migrations.connected(settings) as connection:
        found = sa.Table(table, sa.MetaData(), schema="state", autoload_with=connection)
        columns = [found.c[name] for name in sorted(found.c.keys())]
        return sorted(map(repr, connection.execute(sa.select(*columns))))


def asked(settings: Settings, statement: str) -> list[Any]:
    with migrations.connected(settings) as connection:
        return list(connection.execute(sa.text(statement)).all())


def by_hand(settings: Settings, *statements: str) -> None:
    with migrations.connected(settings) as connection:
        for statement in statements:
            connection.execute(sa.DDL(statement.replace("%", "%%")))


def sums(settings: Settings) -> dict[str, tuple[int, int]]:
    return {row.shop: (row.sold, row.cents) for row in asked(settings, "SELECT * FROM state.by_shop")}


@pytest.fixture
def counted(settings: Settings, register: Callable[..., None], counted_here: None) -> Pipeline:
    register(sales())
    run(settings, sales())
    return sales(2, states=CHANGED)


NAMED_AS_REBUILDS = """
    SELECT conname FROM pg_constraint WHERE connamespace = 'state'::regnamespace AND conname ~ '__v'
    UNION SELECT relname FROM pg_class WHERE relnamespace = 'state'::regnamespace AND relname ~ '__v'
"""


def by_shop(aggregates: Any, **more: Any) -> State:
    return State(key=BY_SHOP, aggregates=aggregates, **more)


OF_TIME: dict[str, Any] = {"columns": {"cents": "integer"}, "order_by": {"at": "timestamptz"}}
WITH_CENTS = {"shop": "text", "cents": "integer"}
# Each state as it was, and as it is declared now; None: it was or is not there.
KINDS: dict[str, tuple[Any, Any]] = {
    "an_aggregate_more": (by_shop(COUNTED), by_shop(SUMMED)),
    "an_aggregate_less": (by_shop(SUMMED), by_shop(COUNTED)),
    "another_key": (by_shop(COUNTED), State(key=WITH_CENTS, aggregates=COUNTED)),
    "a_key_less": (State(key=WITH_CENTS, aggregates=COUNTED), by_shop(COUNTED)),
    "no_key": (by_shop(COUNTED), State(key={}, aggregates=COUNTED)),
    "null_keys": (by_shop(COUNTED), by_shop(COUNTED, null_keys=True)),
    "sessions": (by_shop(COUNTED, window=Tumbling("at", "1 day")), by_shop(COUNTED, window=Session("at", "30 minutes"))),
    "a_state_less": (State(key={}, aggregates=COUNTED), None),
    "a_state_more": (None, State(key={}, aggregates=SUMMED)),
    "another_kind": (by_shop(COUNTED), by_shop(SUMMED, kind="opaque")),
    "windows": (
        by_shop(COUNTED, window=Tumbling("at", "1 day", final_after="1 hour")),
        by_shop(SUMMED, window=Tumbling("at", "6 hours", final_after="1 hour")),
    ),
    "rows": (Rows({"shop": "text"}), Rows(WITH_CENTS)),
    "ranges": (
        Rows({"at": "timestamptz"}, range_partitions=Ranges("at", "month")),
        Rows({"at": "timestamptz", "cents": "integer"}, range_partitions=Ranges("at", "day")),
    ),
    "changes": (by_shop(COUNTED, kind="opaque", changes=True), by_shop(SUMMED, kind="opaque", changes=True)),
    "changes_now": (History(BY_SHOP, **OF_TIME, kind="opaque"), History(BY_SHOP, **OF_TIME, kind="opaque", changes=True)),
    "final_windows": (
        by_shop(COUNTED, window=Tumbling("at", "1 day")),
        by_shop(SUMMED, window=Tumbling("at", "6 hours", final_after="1 hour", emit_final=True)),
    ),
    "newest": (Newest(BY_SHOP, **OF_TIME), Newest(BY_SHOP, **OF_TIME, null_keys=True)),
    "history": (History(BY_SHOP, **OF_TIME), History(BY_SHOP, **OF_TIME | {"columns": {"cents": "bigint"}})),
}


FEW = ["another_key", "a_state_less", "a_state_more", "windows", "rows", "changes"]


@pytest.mark.promise("I24", "decision:0049")
@pytest.mark.parametrize("names", [FEW, pytest.param([*KINDS], marks=pytest.mark.soak)], ids=["few", "all"])
def test_a_rebuilt_state_is_that_of_a_pipeline_that_was_always_declared_so(
    settings: Settings, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    monkeypatch.setattr(range_partitions, "TXIDS", 1)  # what is recorded of each txid is in a partition of its own
    kinds = {name: KINDS[name] for name in names}
    first = sales(states={name: before for name, (before, _) in kinds.items() if before})
    register(first)
    (settings.home / "sales/02.csv").unlink()
    assert run(settings, first) == [1]
    states = {name: after for name, (_, after) in kinds.items() if after}
    changed = sales(2, states=states, transform=lambda rows: rows.selectExpr("at", "shop", "2 * cents AS cents"))
    assert rebuilt(settings, changed) == [1]
    migrate(settings, changed)
    sell(settings, 2, (5, "Faro", 1), (9, "Porto", 2))
    assert run(settings, changed) == [2]
    from_the_beginning(settings, register, changed)
    tables = changed.spec.tables
    assert [name for name in tables if content(settings, name) != content(settings, f"clean_{name}")] == []
    assert [name for name in tables if not content(settings, name)] == []
    assert asked(settings, NAMED_AS_REBUILDS) == []


@pytest.mark.soak
@pytest.mark.promise("I24")
def test_records_that_were_set_aside_mended_replayed_and_skipped_are_so_in_the_rebuild(
    settings: Settings, register: Callable[..., None]
) -> None:
    sell(settings, 1, (9, "Lisbon", 600))
    sell(settings, 2, (9, "Faro", -5), (9, "Faro", -5), (9, "Porto", -1), (10, "Lisbon", "much"))
    sell(settings, 3, (9, "Porto", "damaged"))
    first = sales(check={"priced": "cents >= 0"}, on_poison="quarantine")
    register(first)
    assert run(settings, first) == [1, 2, 3]
    with StateStore.connect(settings) as store:
        records = {record["payload"]: record for record in store.quarantined("inbox")}
        for payload, cents in (("2026-01-02T10:00:00Z,Lisbon,much", 70), ("2026-01-03T09:00:00Z,Porto,damaged", 3)):
            mended = Mend(f"{payload.rpartition(',')[0]},{cents}", "me", "a typo")
            store.mend_quarantined("inbox", records[payload]["txid"], records[payload]["number"], mended)
        assert store.replay_quarantined(first.spec, "me", "mended", txid=2) == (4, 4)
        assert run(settings, first) == [4]
        # A replay that fails is skipped, and gives its records back.
        assert store.replay_quarantined(first.spec, "me", "again", txid=3) == (5, 1)
        with pytest.raises(TidegateError):
            run(settings, replace(first, checks={"never": Check(lambda _batch: sa.select(sa.literal(1)))}))
        store.skip_batch(first.spec, 5, "me", "not now")

        changed = sales(2, check={"priced": "cents >= -1"}, states=CHANGED, on_poison="quarantine")
        assert rebuilt(settings, changed) == [1, 2, 3, 4, 5]
        assert store.replay_quarantined(first.spec, "me", "once more", txid=3) == (6, 1)  # open when the rebuild takes over
        migrate(settings, changed)
        assert sums(settings) == {"Lisbon": (2, 670), "Porto": (1, -1)}
        numbers_of = "SELECT quarantined_rows FROM tidegate.commit WHERE pipeline = 'inbox' ORDER BY txid"
        assert [number for (number,) in asked(settings, numbers_of)] == [0, 3, 1, 2, 0]
        assert run(settings, changed) == [6]
        assert sums(settings)["Porto"] == (2, 2)
        assert [(record["txid"], record["mended_payload"]) for record in store.quarantined("inbox")] == [(4, None)] * 2


@pytest.mark.promise("I24")
def test_what_was_decided_about_a_record_is_kept_to_its_place(settings: Settings, register: Callable[..., None]) -> None:
    """Two inputs have the same record: one's was mended, and now passes its check as it was; the other's is bad under both."""
    for folder in ("sales", "south"):
        (settings.home / folder).mkdir(exist_ok=True)
        (settings.home / folder / "03.csv").write_text("at,shop,cents\n2026-01-03T09:00:00Z,Faro,-5\n")
    files = replace(sales().source, max_files=3)
    source = Inputs({"north": files, "south": replace(files, folder="south")})
    checks = {name: {"priced": "cents > -5"} for name in ("north", "south")}
    first = sales(source=source, check=checks, on_poison="quarantine")
    register(first)
    assert run(settings, first) == [1]
    with StateStore.connect(settings) as store:
        (north, south) = store.quarantined("inbox")
        assert north["payload"] == south["payload"]
        mended = Mend(north["payload"].replace("-5", "70"), "me", "a typo")
        store.mend_quarantined("inbox", 1, north["number"], mended)
        assert store.replay_quarantined(first.spec, "me", "mended") == (2, 2)
    assert run(settings, first) == [2]

    changed = sales(2, source=source, check={"south": checks["south"]}, states=CHANGED, on_poison="quarantine")
    assert rebuilt(settings, changed) == [1, 2]
    with StateStore.connect(settings) as store:
        with pytest.raises(RangeRefused, match="takes what is mended of inbox, so mend the record there"):
            store.mend_quarantined("inbox__v2", 1, 1, mended)
        with pytest.raises(RangeRefused, match="has the batches of inbox and no others"):
            store.replay_quarantined(changed.rebuild().spec, "me", "once more")
    migrate(settings, changed)
    assert sums(settings)["Faro"] == (1, -5)
    with StateStore.connect(settings) as store:
        assert [(bad["origin"][:5], bad["mended_payload"]) for bad in store.quarantined("inbox")] == [("south", None)]


def begun_opaque(settings: Settings, register: Callable[..., None]) -> tuple[Pipeline, Pipeline]:
    """Run the pipeline over an opaque source, and begin its rebuild; return it as it was declared, and as it is now."""
    states = {"by_shop": State(key=BY_SHOP, aggregates=COUNTED, kind="opaque")}
    first = sales(states=states, source=replace(sales().source, kind="opaque"))
    register(first)
    run(settings, first)
    changed = replace(first, version=2, states={"by_shop": State(key=BY_SHOP, aggregates=SUMMED, kind="opaque")})
    with StateStore.connect(settings, user=settings.pg_owner) as owner:
        owner.begin_rebuild(changed.spec)
    return first, changed


@pytest.mark.usefixtures("counted_here")
def test_a_redo_of_what_is_being_rebuilt_is_refused(settings: Settings, register: Callable[..., None]) -> None:
    first, changed = begun_opaque(settings, register)
    redo(settings, first, 2, owner="me", reason="before")
    assert rebuilt(settings, changed) == [1, 2]
    with pytest.raises(RangeRefused, match="inbox 2 cannot be redone: inbox__v2 computes it again"):
        redo(settings, first, 2, owner="me", reason="after")
    with StateStore.connect(settings, user=settings.pg_owner) as owner:
        owner.retire("inbox__v2", Request("me", "wrong"))
    redo(settings, first, 2, owner="me", reason="retired")


@pytest.mark.usefixtures("counted_here")
def test_a_batch_that_is_redone_between_its_plan_and_its_opening_is_planned_again(
    settings: Settings, register: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, changed = begun_opaque(settings, register)
    plan_as_usual, redone = StateStore.batches_to_rebuild, []

    def planned(store: StateStore, spec: PipelineSpec, after: int, most: int) -> list[dict[str, Any]]:
        found = plan_as_usual(store, spec, after, most)
        if not redone:
            sell(settings, 2, (9, "Faro", 33))
            redone.append(redo(settings, first, 2, owner="me", reason="another file"))
        return found

    monkeypatch.setattr(StateStore, "batches_to_rebuild", planned)
    assert rebuilt(settings, changed) == [1, 2]
    migrate(settings, changed)
    assert sums(settings) == {"Lisbon": (1, 100), "Porto": (2, 6), "Faro": (1, 33)}
    before = content(settings, "by_shop")
    redo(settings, changed, 2, owner="me", reason="once more")
    assert content(settings, "by_shop") == before


@pytest.mark.promise("I24")
@pytest.mark.usefixtures("counted_here")
def test_a_batch_that_was_skipped_is_skipped_and_one_that_is_open_is_processed_again(
    settings: Settings, register: Callable[..., None]
) -> None:
    blocks = {"priced": Check(lambda batch: sa.select(batch.state("by_shop").c.shop).where(batch.source_rows > 3))}
    sell(settings, 2, *[(9, "Lisbon", 1000)] * 4)
    first = sales(checks=blocks)
    register(first)
    with pytest.raises(CheckFailed):
        run(settings, first)
    with StateStore.connect(settings) as store:
        store.skip_batch(first.spec, 2, "me", "twice")
        sell(settings, 3, (9, "Lisbon", 300), (10, "Porto", 8))
        assert run(settings, first) == [3]
        sell(settings, 4, (9, "Faro", 4))
        (txid,) = plan(settings, first, run_id="open")
        steps.process(settings, first, txid, owner="test")

    changed = sales(2, checks=blocks, states=CHANGED)
    assert rebuilt(settings, changed) == [1, 2, 3]
    skipped = "SELECT pipeline, txid, skipped_reason FROM tidegate.commit WHERE skipped_reason IS NOT NULL ORDER BY 1"
    assert asked(settings, skipped) == [("inbox", 2, "twice"), ("inbox__v2", 2, "twice")]
    migrate(settings, changed)
    assert run(settings, changed) == [4]
    assert sums(settings) == {"Lisbon": (2, 400), "Porto": (3, 14), "Faro": (1, 4)}


def noted(batch: Any) -> None:
    """Do nothing with the rows of a batch."""


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"states": {"by_shop": Update({"shop": "text"}, noted)}}, "by_shop is an update of your own"),
    ({"queries": [StateQuery("inbox.by_shop")], "transform": lambda rows: rows}, "its transform reads its own states"),
    ({"version": 1}, "first raise its version above 1"),
]


def test_what_would_count_twice_or_see_other_states_is_not_rebuilt(
    settings: Settings, counted: Pipeline, register: Callable[..., None]
) -> None:
    """Nor does a rebuild take the place of what another pipeline has begun to read."""
    with StateStore.connect(settings, user=settings.pg_owner) as owner:
        for changed, refusal in REFUSED:
            with pytest.raises(DeclarationChanged, match=refusal):
                owner.begin_rebuild(replace(counted, **changed).spec)
    rebuilt(settings, counted)
    query = StateQuery("inbox.by_shop", as_of="latest", allow_not_repeatable=True)
    states = {"by_later": State(key=BY_SHOP, aggregates=COUNTED)}
    register(Pipeline("later", sales().source, states, transform=lambda rows: rows, queries=[query]))
    with migrations.connected(settings) as connection:
        (why,) = rebuilds.find(connection, [counted.spec]).pending.values()
    assert "later follows or reads its states" in why


# What a team may have given to a table, as Postgres describes it.
GIVEN = """
    SELECT pg_get_constraintdef(oid) FROM pg_constraint
        WHERE conrelid = 'state.by_shop'::regclass AND contype IN ('c', 'u', 'f')
    UNION ALL SELECT pg_get_statisticsobjdef(oid) FROM pg_statistic_ext WHERE stxrelid = 'state.by_shop'::regclass
    UNION ALL SELECT description FROM pg_description
        WHERE classoid = 'pg_class'::regclass AND objoid = 'state.by_shop'::regclass
    UNION ALL SELECT relname || ' is the replica identity' FROM pg_index JOIN pg_class ON oid = indexrelid
        WHERE indrelid = 'state.by_shop'::regclass AND indisreplident
    UNION ALL SELECT inhparent::regclass::text FROM pg_inherits WHERE inhrelid = 'state.by_shop'::regclass
    UNION ALL SELECT attname || attstattarget FROM pg_attribute
        WHERE attrelid = 'state.by_shop'::regclass AND attstattarget > 0
    UNION ALL SELECT unnest(reloptions) FROM pg_class WHERE oid = 'state.by_shop'::regclass
    UNION ALL SELECT 'toast.' || unnest(reloptions) FROM pg_class
        WHERE oid = (SELECT reltoastrelid FROM pg_class WHERE oid = 'state.by_shop'::regclass)
    UNION ALL SELECT concat_ws(' ', attname, attoptions, attstorage, attcompression) FROM pg_attribute
        WHERE attrelid = 'state.by_shop'::regclass AND attname IN ('shop', 'sold')
    UNION ALL SELECT relname || ' is clustered' FROM pg_index JOIN pg_class ON oid = indexrelid
        WHERE indrelid = 'state.by_shop'::regclass AND indisclustered
    ORDER BY 1
"""


def test_what_the_team_has_given_to_a_table_is_given_to_the_rebuilt_one(settings: Settings, counted: Pipeline) -> None:
    by_hand(
        settings,
        'CREATE TABLE public.shops (shop text COLLATE "C" PRIMARY KEY)',
        "INSERT INTO public.shops VALUES ('Lisbon'), ('Porto')",
        "CREATE TABLE public.united (sold bigint NOT NULL, CHECK (sold > 0))",
        "ALTER TABLE state.by_shop ADD CONSTRAINT a_shop FOREIGN KEY (shop) REFERENCES public.shops",
        "ALTER TABLE state.by_shop ADD CONSTRAINT united_sold_check CHECK (sold > 0)",
        "ALTER TABLE state.by_shop ADD CONSTRAINT known CHECK (shop NOT LIKE '%:x') NOT VALID",
        "ALTER TABLE state.by_shop ADD CONSTRAINT few CHECK (sold < 7)",
        "ALTER TABLE state.by_shop ADD CONSTRAINT once UNIQUE (shop, sold)",
        "ALTER TABLE state.by_shop INHERIT public.united",
        "ALTER TABLE state.by_shop REPLICA IDENTITY USING INDEX pk_by_shop",
        "ALTER TABLE state.by_shop ALTER sold SET STATISTICS 50",
        "CREATE STATISTICS public.together (dependencies) ON shop, sold FROM state.by_shop",
        "COMMENT ON TABLE state.by_shop IS 'The team''s: 50 %'",
        "COMMENT ON COLUMN state.by_shop.sold IS 'how many'",
        "CREATE INDEX by_sold ON state.by_shop (sold) WHERE shop LIKE 'L%'",
        "GRANT UPDATE ON state.by_shop TO tidegate_stager",
        "ALTER TABLE state.by_shop SET (fillfactor = 60, parallel_workers = 3, toast.autovacuum_enabled = off)",
        "ALTER TABLE state.by_shop ALTER shop SET STORAGE EXTERNAL, ALTER shop SET COMPRESSION pglz",
        "ALTER TABLE state.by_shop ALTER sold SET (n_distinct = 5), CLUSTER ON pk_by_shop",
    )
    before = [text for (text,) in asked(settings, GIVEN)]
    assert {"fillfactor=60", "toast.autovacuum_enabled=off", "pk_by_shop is clustered", "shop e p"} < set(before)
    twice = lambda rows: rows.unionAll(rows)  # noqa: E731
    twice.in_process = lambda inputs: inputs[""] * 2  # type: ignore[attr-defined]
    counted = replace(counted, transform=twice)
    rebuilt(settings, counted)
    migrations.new_revision(settings, [counted.spec], "more")
    with pytest.raises(DeclarationChanged, match=r'"few" .* is violated by some row .*Drop that from state.by_shop'):
        migrations.upgrade(settings, [counted.spec])
    assert [text for (text,) in asked(settings, GIVEN)] == before
    by_hand(settings, "ALTER TABLE state.by_shop DROP CONSTRAINT few")
    assert migrations.upgrade(settings, [counted.spec])[1] == ["inbox"]
    assert [text for (text,) in asked(settings, GIVEN)] == [text for text in before if text != "CHECK ((sold < 7))"]
    assert asked(settings, "SELECT sum(sold) FROM public.united") == asked(settings, "SELECT sum(sold) FROM state.by_shop")
    indexes = "SELECT indexdef FROM pg_indexes WHERE tablename = 'by_shop' ORDER BY indexname"
    assert [definition for (definition,) in asked(settings, indexes)] == [
        "CREATE INDEX by_sold ON state.by_shop USING btree (sold) WHERE (shop ~~ 'L%'::text)",
        "CREATE UNIQUE INDEX once ON state.by_shop USING btree (shop, sold)",
        "CREATE UNIQUE INDEX pk_by_shop ON state.by_shop USING btree (shop)",
    ]
    assert asked(settings, "SELECT has_table_privilege('tidegate_stager', 'state.by_shop', 'UPDATE')") == [(True,)]


HIDDEN = (
    ["COMMENT ON TABLE state.by_shop IS 'not hidden'"],
    ["ALTER TABLE state.by_shop ENABLE ROW LEVEL SECURITY"],
    ["ALTER TABLE state.by_shop DISABLE ROW LEVEL SECURITY", "REVOKE SELECT ON state.by_shop FROM tidegate_reader"],
)


def test_who_may_not_read_a_state_may_not_read_what_is_rebuilt(settings: Settings, counted: Pipeline) -> None:
    """The tables of a rebuild have the default privileges of new tables, by which every reader would see them."""
    for version, statements in enumerate(HIDDEN, start=2):
        by_hand(settings, *statements)
        with StateStore.connect(settings, user=settings.pg_owner) as owner:
            owner.begin_rebuild(replace(counted, version=version).spec)
        readable = f"SELECT has_table_privilege('tidegate_reader', 'state.by_shop__v{version}', 'SELECT')"
        assert asked(settings, readable) == [(version == 2,)]


@pytest.mark.promise("I24", "decision:0049")
def test_readers_see_the_former_or_the_rebuilt_state_and_never_a_part(settings: Settings, counted: Pipeline) -> None:
    changed = replace(counted, states={"by_shop": State(key=BY_SHOP, aggregates=COUNTED | {"cents": Sum("cents", "bigint")})})
    counts = [{"shop": "Lisbon", "sold": 2}, {"shop": "Porto", "sold": 4}]
    sums = [{"shop": "Lisbon", "sold": 2, "cents": 300}, {"shop": "Porto", "sold": 4, "cents": 13}]
    seen: list[tuple[int, Any]] = []
    stopped = threading.Event()

    def read() -> None:
        with StateReader.open(settings, "inbox", "by_shop") as reader:
            while not stopped.is_set():
                found = reader.range(limit=10)
                seen.append((found.txid, [{n: v for n, v in row.items() if n != "txid"} for row in found.rows]))

    with LedgerReader(settings) as ledger, ThreadPoolExecutor(1) as pool:

        def version() -> str:
            with ledger.snapshot("reading the version") as connection:
                return str(version_of(connection, "inbox"))

        before = version()
        reading = pool.submit(read)
        try:
            rebuilt(settings, changed)
            assert version() == before
            migrate(settings, changed)
            assert wait_until(lambda: [found for _, found in seen[-2:]] == [sums, sums], 60)
        finally:
            stopped.set()
        reading.result()
        assert version() != before
    assert [found for _, found in seen if found not in (counts, sums)] == []
    assert {txid for txid, _ in seen} == {2}
    first_new = [found for _, found in seen].index(sums)
    assert 10 < first_new < len(seen) - 1
    assert all(found == sums for _, found in seen[first_new:])


def test_a_declaration_that_changes_during_its_rebuild_needs_another_version(settings: Settings, counted: Pipeline) -> None:
    """Even before its first commit: its tables are those of the former declaration."""
    other = replace(counted, states={"by_shop": State(key={}, aggregates=SUMMED)})
    with StateStore.connect(settings, user=settings.pg_owner) as owner:
        owner.begin_rebuild(counted.spec)
        with pytest.raises(DeclarationChanged, match=r"inbox__v2 was begun for another declaration of inbox\. Raise"):
            owner.begin_rebuild(other.spec)
        owner.retire("inbox__v2", Request("me", "wrong"))
        with pytest.raises(PipelineRetired):
            owner.begin_rebuild(counted.spec)
        with pytest.raises(RangeRefused, match="inbox__v2 cannot be reinstated: what it has read may have been redone"):
            owner.reinstate("inbox__v2", "me", "wanted")
