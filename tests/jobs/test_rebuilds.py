"""Rebuilds of each kind of state, compared with a pipeline that was declared so from the beginning; what is refused."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import sqlalchemy as sa

from tests import steps
from tests import store as ledger
from tests.sources.in_process import meanwhile
from tests.statements import execute
from tidegate import jobs, migrations
from tidegate.jobs.checks import no_nulls
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import CheckFailed, DeclarationChanged, PipelineRetired, RangeRefused

numbers = count()
COUNTED = {"sold": jobs.Count()}
SUMMED = {"sold": jobs.Count(), "cents": jobs.Sum("cents", "bigint"), "dearest": jobs.Max("cents", "integer")}
BY_SHOP = {"shop": "text"}


def by_shop(aggregates: Any, **more: Any) -> jobs.State:
    return jobs.State(key=BY_SHOP, aggregates=aggregates, **more)


CHANGED = {"by_shop": by_shop(SUMMED)}


def sales(version: int = 1, **changed: Any) -> jobs.Pipeline:
    schema = {"at": "timestamp", "shop": "string", "cents": "int"}
    files = jobs.Files("sales", glob="*.csv", format="csv", schema=schema, max_files=1)
    usual = {"source": files, "states": {"by_shop": by_shop(COUNTED)}, "tries": 1}
    return jobs.Pipeline("inbox", version=version, **usual | changed)


class Shops:
    """Files of sales, one a day, of which two are there at first; a pipeline over them, and its rebuild."""

    def __init__(self, settings: Settings, register: Callable[..., None], owner: StateStore) -> None:
        self.settings = settings
        self.register = register
        self.owner = owner
        (settings.home / "sales").mkdir()
        for day in (1, 2):
            self.sell(day, (9, "Lisbon", 100 * day), (10, "Porto", 7), (11, "Porto", day - 2))

    def sell(self, day: int, *rows: tuple[int, str, Any]) -> None:
        lines = [f"2026-01-{day:02d}T{hour:02d}:00:00Z,{shop},{cents}" for hour, shop, cents in rows]
        (self.settings.home / f"sales/{day:02d}.csv").write_text("\n".join(["at,shop,cents", *lines, ""]))

    def begin(self, pipeline: jobs.Pipeline) -> jobs.Pipeline:
        """Register a pipeline and run what it can."""
        self.register(pipeline)
        self.run(pipeline)
        return pipeline

    def run(self, pipeline: jobs.Pipeline) -> list[int]:
        return steps.run(self.settings, pipeline, f"run {next(numbers)}")

    def rebuild(self, pipeline: jobs.Pipeline) -> list[int]:
        txids: list[int] = []
        while (progress := self.owner.begin_rebuild(pipeline.spec)).rebuilt < progress.committed:
            txids += self.run(pipeline.rebuild())
        return txids

    def redo(self, pipeline: jobs.Pipeline) -> None:
        steps.redo(self.settings, pipeline, 2, owner="me", reason="a test")

    def migrate(self, pipeline: jobs.Pipeline) -> None:
        migrations.new_revision(self.settings, [pipeline.spec], "changed")
        assert migrations.upgrade(self.settings, [pipeline.spec])[1] == [pipeline.name]

    def ask(self, *statements: str) -> list[Any]:
        """Run statements as the owner; return the rows of the last."""
        return execute(self.settings.conninfo(user=self.settings.pg_owner), ";".join(statements))

    def content(self, table: str) -> list[str]:
        return sorted(row for (row,) in self.ask(f"SELECT to_jsonb(t)::text FROM state.{table} t"))

    def version(self) -> str:
        """Return what readers know an answer's states by."""
        with ledger.LedgerReader(self.settings) as reader, reader.snapshot("reading the version") as connection:
            return str(ledger.version_of(connection, "inbox"))

    def sums(self, table: str = "by_shop") -> dict[str, tuple[int, int]]:
        return {shop: (sold, cents) for shop, sold, cents in self.ask(f"SELECT shop, sold, cents FROM state.{table}")}


@pytest.fixture
def shops(settings: Settings, register: Callable[..., None], owner: StateStore, monkeypatch: pytest.MonkeyPatch) -> Shops:
    monkeypatch.setenv(ledger.HOME_VARIABLE, str(settings.home))
    (settings.home / "pipelines").mkdir()
    return Shops(settings, register, owner)


@pytest.fixture
def counted(shops: Shops, counted_here: None) -> jobs.Pipeline:
    """Return the pipeline as it is declared now; what it was has run."""
    shops.begin(sales())
    return sales(2, states=CHANGED)


OF_TIME: dict[str, Any] = {"columns": {"cents": "integer"}, "order_by": {"at": "timestamptz"}}
CHANGES: dict[str, Any] = {"kind": "opaque", "changes": True}
DAYS, QUARTERS = jobs.Tumbling("at", "1 day"), jobs.Tumbling("at", "6 hours", final_after="1 hour", emit_final=True)
BY_MONTH = jobs.Rows({"at": "timestamptz"}, range_partitions=jobs.Ranges("at", "month"))
BY_DAY = jobs.Rows({"at": "timestamptz", "cents": "integer"}, range_partitions=jobs.Ranges("at", "day"))
# Each state as it was, and as it is declared now; None: it was or is not there.
KINDS: dict[str, tuple[Any, Any]] = {
    "another_key": (by_shop(COUNTED), jobs.State(BY_SHOP | {"cents": "integer"}, COUNTED)),
    "a_state_less": (jobs.State(key={}, aggregates=COUNTED), None),
    "a_state_more": (None, jobs.State(key={}, aggregates=SUMMED)),
    "windows": (by_shop(COUNTED, window=DAYS), by_shop(SUMMED, window=QUARTERS)),
    "rows": (BY_MONTH, BY_DAY),
    "rows_together": (BY_MONTH, BY_DAY),  # when it is migrated, they are not divided any more
    "changes": (by_shop(COUNTED, **CHANGES), by_shop(SUMMED, **CHANGES)),
    "newest": (jobs.Newest(BY_SHOP, **OF_TIME), jobs.Newest(BY_SHOP, **OF_TIME, null_keys=True)),
    "history": (jobs.History(BY_SHOP, **OF_TIME, kind="opaque"), jobs.History(BY_SHOP, **OF_TIME, **CHANGES)),
    "by_another_column": (BY_DAY, jobs.Rows({"cents": "integer"}, range_partitions=jobs.Ranges("cents", 100))),
    "then_by_key": (BY_DAY, by_shop(SUMMED)),
    "from_a_key": (by_shop({"at": jobs.Max("at", "timestamptz")}), BY_DAY),
}
NAMED_AS_REBUILDS = """
    SELECT conname FROM pg_constraint WHERE connamespace = 'state'::regnamespace AND conname ~ '__v'
    UNION SELECT relname FROM pg_class WHERE relnamespace = 'state'::regnamespace AND relname ~ '__v'
"""


@pytest.mark.promise("I24", "decision:0049")
def test_a_rebuilt_state_is_that_of_a_pipeline_always_declared_so(shops: Shops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger.range_partitions, "TXIDS", 1)  # what is recorded of each txid is in a partition of its own
    (shops.settings.home / "sales/02.csv").unlink()
    shops.begin(sales(states={name: before for name, (before, _) in KINDS.items() if before}))
    states = {name: after for name, (_, after) in KINDS.items() if after}
    changed = sales(2, states=states, transform=lambda rows: rows.selectExpr("at", "shop", "2 * cents AS cents"))
    before = shops.version(), shops.content("another_key")
    assert shops.rebuild(changed) == [1]
    assert (shops.version(), shops.content("another_key")) == before
    changed = replace(changed, states=states | {"rows_together": replace(BY_DAY, range_partitions=None)})
    shops.migrate(changed)
    assert migrations.upgrade(shops.settings, [changed.spec])[1] == []
    assert shops.version() != before[0]
    shops.sell(2, (5, "Faro", 1), (9, "Porto", 2))
    assert shops.run(changed) == [2]
    shops.begin(replace(changed, name="clean", states={f"clean_{name}": state for name, state in states.items()}))
    tables = changed.spec.tables
    assert [name for name in tables if shops.content(name) != shops.content(f"clean_{name}")] == []
    assert [name for name in tables if not shops.content(name)] == []
    assert shops.ask(NAMED_AS_REBUILDS) == []


@pytest.mark.promise("I24")
def test_what_was_decided_about_a_record_is_kept_to_its_place(shops: Shops, store: StateStore) -> None:
    """Two inputs have the same record: one's was mended, and now passes its check as it was; the other's is bad under both."""
    (shops.settings.home / "south").mkdir()
    for folder in ("sales", "south"):
        (shops.settings.home / folder / "03.csv").write_text("at,shop,cents\n2026-01-03T09:00:00Z,Faro,-5\n")
    files = replace(sales().source, max_files=3)
    source = jobs.Inputs({"north": files, "south": replace(files, folder="south")})
    checks = {name: {"priced": "cents > -5"} for name in ("north", "south")}
    first = shops.begin(sales(source=source, check=checks, on_poison="quarantine"))
    changed = sales(2, source=source, check={"south": checks["south"]}, states=CHANGED, on_poison="quarantine")
    (north, south) = store.quarantined("inbox")
    assert north["payload"] == south["payload"]
    mended = ledger.Mend(north["payload"].replace("-5", "70"), "me", "a typo")
    store.mend_quarantined("inbox", 1, north["number"], mended)
    assert store.replay_quarantined(first.spec, "me", "mended") == (2, 2)
    assert shops.run(first) == [2]
    assert shops.rebuild(changed) == [1, 2]
    with pytest.raises(RangeRefused, match="takes what is mended of inbox, so mend the record there"):
        store.mend_quarantined("inbox__v2", 1, 1, mended)
    with pytest.raises(RangeRefused, match="has the batches of inbox and no others"):
        store.replay_quarantined(changed.rebuild().spec, "me", "once more")
    shops.migrate(changed)
    assert shops.sums()["Faro"] == (1, -5)
    assert [(bad["origin"][:5], bad["mended_payload"]) for bad in store.quarantined("inbox")] == [("south", None)]


@pytest.mark.promise("I24")
def test_what_was_mended_is_the_same_record_with_other_columns(shops: Shops, store: StateStore) -> None:
    """Of two mended records that were kept by their columns, one was replayed, and the other waits.

    First there is a column more, then that is gone, and another has another type.
    """
    (shops.settings.home / "sales/02.csv").unlink()
    for day, cents in ((3, -5), (4, -6)):
        (shops.settings.home / f"sales/0{day}.csv").write_text(f"at,shop,cents,more\n2026-01-03T09:00:00Z,Faro,{cents},x\n")
    source = replace(sales().source, max_files=2)
    first = shops.begin(sales(source=source, check={"priced": "cents > -5"}, on_poison="quarantine"))
    for bad in store.quarantined("inbox"):
        mended = ledger.Mend(bad["payload"].replace(":-", ":7"), "me", "a typo")
        store.mend_quarantined("inbox", bad["txid"], bad["number"], mended)
    store.replay_quarantined(first.spec, "me", "mended", txid=1)
    shops.run(first)
    source = replace(source, schema={**source.schema, "more": "string"}, missing="null")
    changed = replace(first, version=2, source=source, states=CHANGED)
    for end in ('"more":"x"}', 'nts":-6.00}'):
        shops.rebuild(changed)
        shops.migrate(changed)
        assert shops.sums()["Faro"] == (1, 75)
        (bad,) = store.quarantined("inbox")
        assert (bad["payload"][-11:], bad["mended_payload"][-11:]) == (end, '"cents":76}')
        source = replace(source, schema={**sales().source.schema, "cents": "decimal(9,2)"})
        states = {"by_shop": by_shop({"sold": jobs.Count(), "cents": jobs.Sum("cents", "numeric(9,2)")})}
        changed = replace(changed, version=3, source=source, states=states)


@pytest.mark.usefixtures("counted_here")
def test_what_is_redone_during_a_rebuild_is_planned_again_or_refused(shops: Shops) -> None:
    source = replace(sales().source, kind="opaque")
    first = shops.begin(sales(states={"by_shop": by_shop(COUNTED, kind="opaque")}, source=source))
    changed = replace(first, version=2, states={"by_shop": by_shop(SUMMED, kind="opaque")})
    shops.sell(2, (9, "Faro", 33))
    with meanwhile(StateStore, "open_batches", lambda: shops.redo(first)):
        assert shops.rebuild(changed) == [1, 2]
    assert shops.sums("by_shop__v2") == {"Lisbon": (1, 100), "Porto": (2, 6), "Faro": (1, 33)}
    with pytest.raises(RangeRefused, match="inbox 2 cannot be redone: inbox__v2 computes it again"):
        shops.redo(first)
    shops.owner.retire("inbox__v2", ledger.Request("me", "wrong"))
    shops.redo(first)
    changed = replace(changed, version=3)
    assert shops.rebuild(changed) == [1, 2]
    shops.migrate(changed)
    before = shops.content("by_shop")
    shops.redo(changed)
    assert shops.content("by_shop") == before


@pytest.mark.usefixtures("counted_here")
@pytest.mark.promise("I24")
def test_a_batch_that_was_skipped_is_skipped_and_one_that_is_open_is_processed_again(shops: Shops, store: StateStore) -> None:
    blocks = {"priced": jobs.Check(lambda batch: sa.select(batch.state("by_shop").c.shop).where(batch.source_rows > 3))}
    shops.sell(2, *[(9, "Lisbon", 1000)] * 4)
    known = {"known": jobs.Check(no_nulls("by_shop", "shop"), otherwise="warn")}
    first, changed = sales(checks=blocks), sales(2, checks=blocks | known, states=CHANGED)
    with pytest.raises(CheckFailed):
        shops.begin(first)
    store.skip_batch(first.spec, 2, "me", "twice")
    shops.sell(3, (9, "Lisbon", 300), (10, "Porto", 8))
    assert shops.run(first) == [3]
    shops.sell(4, (9, "Faro", 4))
    (txid,) = steps.plan(shops.settings, first, run_id="open")
    steps.process(shops.settings, first, txid, owner="test")
    assert shops.rebuild(changed) == [1, 2, 3]
    skipped = "SELECT pipeline, txid, skipped_reason FROM tidegate.commit WHERE skipped_reason IS NOT NULL ORDER BY 1"
    assert shops.ask(skipped) == [("inbox", 2, "twice"), ("inbox__v2", 2, "twice")]
    shops.migrate(changed)
    evaluated = "SELECT pipeline, name, count(*) FROM tidegate.check_result GROUP BY 1, 2 ORDER BY 1, 2"
    assert shops.ask(evaluated) == [("inbox", "known", 2), ("inbox", "priced", 2)]
    assert shops.run(changed) == [4]
    assert shops.sums() == {"Lisbon": (2, 400), "Porto": (3, 14), "Faro": (1, 4)}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"states": {"by_shop": jobs.Update({"shop": "text"}, lambda _batch: None)}}, "by_shop is an update of your own"),
    ({"queries": [jobs.StateQuery("inbox.by_shop")], "transform": lambda rows: rows}, "its transform reads its own states"),
    ({"version": 1}, "first raise its version above 1"),
    # Even before its first commit: its tables are those of the former declaration.
    ({"states": {"by_shop": jobs.State({}, SUMMED)}}, r"inbox__v2 was begun for another declaration of inbox\. Raise"),
]


def test_what_would_count_twice_or_see_other_states_is_not_rebuilt(shops: Shops, counted: jobs.Pipeline) -> None:
    """Nor does a rebuild take the place of what another pipeline has begun to read, nor does one that is retired go on."""
    shops.owner.begin_rebuild(counted.spec)
    for changed, refusal in REFUSED:
        with pytest.raises(DeclarationChanged, match=refusal):
            shops.owner.begin_rebuild(replace(counted, **changed).spec)
    shops.owner.retire("inbox__v2", ledger.Request("me", "wrong"))
    with pytest.raises(PipelineRetired):
        shops.owner.begin_rebuild(counted.spec)
    with pytest.raises(RangeRefused, match="inbox__v2 cannot be reinstated: what it has read may have been redone"):
        shops.owner.reinstate("inbox__v2", "me", "wanted")
    counted = replace(counted, version=3)
    shops.rebuild(counted)
    query = jobs.StateQuery("inbox.by_shop", as_of="latest", allow_not_repeatable=True)
    states = {"by_later": by_shop(COUNTED)}
    shops.register(jobs.Pipeline("later", sales().source, states, transform=lambda rows: rows, queries=[query]))
    with migrations.connected(shops.settings) as connection:
        (why,) = ledger.rebuilds.find(connection, [counted.spec]).pending.values()
    assert "later follows or reads its states" in why


# What a team may have given to a table, as Postgres describes it.
GIVEN = """
    WITH state AS (SELECT oid, reltoastrelid, reloptions FROM pg_class WHERE oid = 'state.by_shop'::regclass)
    SELECT pg_get_constraintdef(c.oid) FROM pg_constraint c, state WHERE conrelid = state.oid AND contype IN ('c', 'u', 'f')
    UNION ALL SELECT pg_get_statisticsobjdef(s.oid) FROM pg_statistic_ext s, state WHERE stxrelid = state.oid
    UNION ALL SELECT description FROM pg_description, state WHERE classoid = 'pg_class'::regclass AND objoid = state.oid
    UNION ALL SELECT concat_ws(' ', indexrelid::regclass, indisreplident, indisclustered, pg_get_indexdef(indexrelid))
        FROM pg_index, state WHERE indrelid = state.oid
    UNION ALL SELECT inhparent::regclass::text FROM pg_inherits, state WHERE inhrelid = state.oid
    UNION ALL SELECT concat_ws(' ', attname, attoptions, attstorage, attcompression, attstattarget) FROM pg_attribute, state
        WHERE attrelid = state.oid AND attname IN ('shop', 'sold')
    UNION ALL SELECT unnest(reloptions) FROM state
    UNION ALL SELECT 'toast.' || unnest(t.reloptions) FROM pg_class t, state WHERE t.oid = state.reltoastrelid
    UNION ALL SELECT 'UPDATE' WHERE has_table_privilege('tidegate_stager', 'state.by_shop', 'UPDATE')
    ORDER BY 1
"""
GIVE = """
    CREATE TABLE public.shops (shop text COLLATE "C" PRIMARY KEY);
    INSERT INTO public.shops VALUES ('Lisbon'), ('Porto');
    CREATE TABLE public.united (sold bigint NOT NULL, CHECK (sold > 0));
    ALTER TABLE state.by_shop ADD CONSTRAINT united_sold_check CHECK (sold > 0), ADD CONSTRAINT few CHECK (sold < 7),
        ADD CONSTRAINT a_shop FOREIGN KEY (shop) REFERENCES public.shops, ADD CONSTRAINT once UNIQUE (shop, sold),
        ADD CONSTRAINT known CHECK (shop NOT LIKE '%:x') NOT VALID, REPLICA IDENTITY USING INDEX pk_by_shop,
        SET (fillfactor = 60, parallel_workers = 3, toast.autovacuum_enabled = off), CLUSTER ON pk_by_shop,
        ALTER shop SET STORAGE EXTERNAL, ALTER shop SET COMPRESSION pglz, ALTER sold SET STATISTICS 50,
        ALTER sold SET (n_distinct = 5);
    ALTER TABLE state.by_shop INHERIT public.united;
    CREATE STATISTICS public.together (dependencies) ON shop, sold FROM state.by_shop;
    COMMENT ON TABLE state.by_shop IS 'The team''s: 50 %';
    COMMENT ON COLUMN state.by_shop.sold IS 'how many';
    CREATE INDEX by_sold ON state.by_shop (sold) WHERE shop LIKE 'L%';
    GRANT UPDATE ON state.by_shop TO tidegate_stager
"""


@pytest.mark.filterwarnings("error::sqlalchemy.exc.SAWarning")
def test_what_the_team_has_given_to_a_table_is_given_to_the_rebuilt_one(shops: Shops, counted: jobs.Pipeline) -> None:
    shops.ask(GIVE)
    before = shops.ask(GIVEN)
    assert len(before) == 20
    twice = lambda rows: rows.unionAll(rows)  # noqa: E731
    twice.in_process = lambda inputs: inputs[""] * 2  # type: ignore[attr-defined]
    counted = replace(counted, transform=twice)
    shops.rebuild(counted)
    migrations.new_revision(shops.settings, [counted.spec], "more")
    with pytest.raises(DeclarationChanged, match=r'"few" .* is violated by some row .*Drop that from state.by_shop'):
        migrations.upgrade(shops.settings, [counted.spec])
    assert shops.ask(GIVEN) == before
    shops.ask("ALTER TABLE state.by_shop DROP CONSTRAINT few")
    assert migrations.upgrade(shops.settings, [counted.spec])[1] == ["inbox"]
    assert shops.ask(GIVEN) == [each for each in before if each != ("CHECK ((sold < 7))",)]
    assert shops.ask("SELECT sum(sold) FROM public.united") == shops.ask("SELECT sum(sold) FROM state.by_shop")


MONEY = {"sold": jobs.Count(), "cents": jobs.Sum("cents", "numeric(12,2)")}


@pytest.mark.usefixtures("counted_here")
def test_columns_of_a_team_are_neither_lost_nor_taken_for_declared_ones(shops: Shops) -> None:
    """A type that was accepted holds until another table takes the place of the one that has it."""
    states = {"by_shop": by_shop(MONEY), "days": BY_DAY}
    shops.begin(sales(states=states))
    noted = "ALTER TABLE state.by_shop ADD note text, ALTER cents TYPE numeric(14,2)", "ALTER TABLE state.days ADD note text"
    shops.ask(*noted, "SET tidegate.writer = inbox", "UPDATE state.days SET note = 'x'")
    migrations.accept_table(shops.settings, "by_shop", "me")
    columns = BY_DAY.columns
    filled = replace(BY_DAY, columns={**columns, "note": "text"}), "days has a column note of your own, with values"
    undivided = jobs.Rows({"cents": "integer"}), "at divides state days by ranges, so it cannot be dropped. First declare"
    for rows, refusal in (filled, undivided):
        with pytest.raises(DeclarationChanged, match=refusal):
            migrations.new_revision(shops.settings, [sales(2, states={**states, "days": rows}).spec], "refused")
    changed = sales(2, states={"by_shop": by_shop({**MONEY, "n": jobs.Count()})})
    shops.rebuild(changed)
    with pytest.raises(DeclarationChanged, match="by_shop, which has column note, which is not declared"):
        shops.migrate(changed)
    shops.ask("ALTER TABLE state.by_shop DROP note")
    assert migrations.upgrade(shops.settings, [changed.spec])[1] == ["inbox"]
    shops.sell(3, (9, "Lisbon", 300))
    assert shops.run(changed) == [3]


HIDDEN = (
    ["COMMENT ON TABLE state.by_shop IS 'not hidden'"],
    ["ALTER TABLE state.by_shop ENABLE ROW LEVEL SECURITY"],
    ["ALTER TABLE state.by_shop DISABLE ROW LEVEL SECURITY", "REVOKE SELECT ON state.by_shop FROM tidegate_reader"],
)


def test_who_may_not_read_a_state_may_not_read_what_is_rebuilt(shops: Shops, counted: jobs.Pipeline) -> None:
    """The tables of a rebuild have the default privileges of new tables, by which every reader would see them."""
    for version, statements in enumerate(HIDDEN, start=2):
        shops.ask(*statements)
        shops.owner.begin_rebuild(replace(counted, version=version).spec)
        readable = f"SELECT has_table_privilege('tidegate_reader', 'state.by_shop__v{version}', 'SELECT')"
        assert shops.ask(readable) == [(version == 2,)]
