"""What lies before a position of a table, and may change: the order of texts, and times that are rounded."""

from dataclasses import replace

import pytest

from tests.sources.shop import DATED, ORDERS, Shop, refused, shop, shops
from tidegate.jobs import PostgresTable
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable

__all__ = ["shop", "shops"]  # fixtures

CODES = PostgresTable(table="codes", key="code", schema={"code": "string"}, wait_seconds=0, key_is_drawn=True, max_rows=4)
BY_QUERY = replace(CODES, table=None, query="SELECT lower(code) AS code FROM codes")
TRIGGER = """
    CREATE FUNCTION rounded() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN NEW.written := date_trunc('second', now()); RETURN NEW; END $$;
    CREATE TRIGGER rounded BEFORE INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION rounded()
"""
THROUGH_A_VARIABLE = TRIGGER.replace("BEGIN", "DECLARE t timestamptz(0) := now(); day date; BEGIN day := now()::date;").replace(
    "date_trunc('second', now())", "t"
)
INTO = TRIGGER.replace(
    "NEW.written := date_trunc('second', now())", "SELECT date_trunc('second', now()) INTO STRICT NEW.written"
)
FUNCTION = """
    CREATE FUNCTION seconds() RETURNS timestamptz LANGUAGE sql RETURN date_trunc('second', now());
    CREATE FUNCTION moment() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RETURN seconds(); END $$;
    ALTER TABLE orders ALTER written SET DEFAULT moment()
"""
OF_DOMAIN = """
    CREATE DOMAIN moment AS timestamptz DEFAULT date_trunc('second', now());
    ALTER TABLE orders ALTER written DROP DEFAULT, ALTER written TYPE moment
"""
DOMAIN = "CREATE DOMAIN seconds AS timestamptz(0); CREATE DOMAIN whole AS seconds; ALTER TABLE orders ALTER written TYPE whole"
VIEW = "CREATE VIEW rounded AS SELECT id, name, amount, date_trunc('second', written) AS written FROM orders"
BINNED = "date_bin('1 second', written, '2000-01-01')"
# By what rounds: statements, the query that reads the table, and the time that it has.
ROUNDED: dict[str, tuple[str, str | None, str]] = {
    "type": ("ALTER TABLE orders ALTER written TYPE timestamptz(0)", None, "written"),
    "domain": (DOMAIN, None, "written"),
    "view": (VIEW, "SELECT * FROM rounded", "date_trunc('second', written)"),
    "query": ("", "SELECT id, name, amount, written::timestamptz(0) AS written FROM orders", "written::timestamptz(0)"),
    "trigger": (TRIGGER, None, "written"),
    "trigger, through a variable": (THROUGH_A_VARIABLE, None, "written"),
    "trigger, by INTO": (INTO, None, "written"),
    "functions of the default": (FUNCTION, None, "written"),
    "default of a domain": (OF_DOMAIN, None, "written"),
    "default": ("ALTER TABLE orders ALTER written SET DEFAULT date_trunc('seconds', now())", None, "written"),
    "bin": ("", f"SELECT id, name, amount, {BINNED} AS written FROM orders", BINNED),
}
# Expressions of a time that is rounded to more than a day, shifted, or rounded in a way that cannot be known.
TOO_FAR = (
    *(f"date_trunc('{unit}', written)" for unit in ("week", "month", "QUARTER", "year", "decade", "century", "millennium")),
    "date_trunc('Year', written, 'UTC')",
    "date_trunc(name, written)",
    "date_bin('2 days', written, '2000-01-01')",
    "hourly(written)",
    "to_timestamp(floor(extract(epoch FROM written) / 300) * 300)",
    "to_timestamp(extract(epoch FROM written)::bigint / 300 * 300)",
    "written - interval '1 hour'",
    "'epoch'::timestamptz + extract(epoch FROM written)::int * interval '1 second'",
    "written AT TIME ZONE 'Europe/Berlin' AT TIME ZONE 'UTC'",
    "written::timestamp::timestamptz",
    "to_char(written, 'YYYY-MM-DD HH24:00')::timestamptz",
    "make_date(2024, amount, 1)::timestamptz",
)


@pytest.mark.promise("I11")
@pytest.mark.parametrize("source", [CODES, BY_QUERY], ids=["table", "query"])
def test_another_order_of_texts_is_refused(shop: Shop, source: PostgresTable) -> None:
    """In another collation, or in another version of its rules, a text may come before the position that came after it."""
    shop.execute('CREATE TABLE codes (code text COLLATE "POSIX" PRIMARY KEY)')
    shop.execute("INSERT INTO codes SELECT format('a-%s', n) FROM generate_series(10, 13) AS n")
    first = shop.planned(source)
    assert shop.plan(source, first) is None
    assert [text.split()[0] for text in first["origin"]["collations"]] == ['"POSIX"']
    shop.execute('ALTER TABLE codes ALTER code TYPE text COLLATE "C"')

    with pytest.raises(SourceChanged, match=r'key column code had collation "POSIX".* now it has "C"'):
        shop.plan(source, first)
    again = replace(source, generation=2, keeps_position=True)
    shop.execute("INSERT INTO codes VALUES ('b-14')")
    assert shop.planned(again, first)["to"] == ["b-14"]


@pytest.mark.promise("I11")
def test_another_collation_of_the_name_is_refused(shop: Shop) -> None:
    """It has the same version, and another order."""
    shop.execute("CREATE COLLATION ours (provider = libc, locale = 'C')")
    shop.execute("CREATE TABLE codes (code text COLLATE ours PRIMARY KEY)")
    shop.execute("INSERT INTO codes VALUES ('a-10')")
    first = shop.planned(CODES)
    for statement in (
        "ALTER COLLATION ours RENAME TO older",
        "CREATE COLLATION ours (provider = libc, locale = 'POSIX')",
        "ALTER TABLE codes ALTER code TYPE text COLLATE ours",
    ):
        shop.execute(statement)

    with pytest.raises(SourceChanged, match="key column code had collation ours"):
        shop.plan(CODES, first)


@pytest.mark.promise("I11", "I12")
@pytest.mark.parametrize("source", [ORDERS, DATED], ids=["transactional", "opaque"])
def test_a_view_that_shows_more_rows_is_refused(shop: Shop, source: PostgresTable) -> None:
    """Those before the position would be passed over. The same view made again, or under another search_path, is the same."""
    shop.execute("CREATE VIEW shown AS SELECT * FROM orders WHERE amount % 2 = 0")
    shop.sell(20)
    shop.execute("SELECT pg_sleep(0.1)")
    source = replace(source, table=None, query="SELECT * FROM public.shown", key_is_drawn=source is ORDERS)
    first = shop.planned(source)
    shop.execute("DROP VIEW shown")
    shop.execute("CREATE VIEW shown AS SELECT * FROM  orders WHERE amount % 2 = 0")
    database = shop.settings.pg_database
    shop.execute(f"ALTER DATABASE {database} SET search_path = pg_catalog")
    assert shop.plan(source, first) is None
    shop.execute(f"ALTER DATABASE {database} RESET search_path")
    upgraded = {name: f"9 {digest.split()[1][::-1]}" for name, digest in first["origin"]["views"].items()}
    assert shop.plan(source, {**first, "origin": {**first["origin"], "views": upgraded}}) is None
    shop.execute("CREATE OR REPLACE VIEW shown AS SELECT * FROM orders WHERE amount < 5")

    with pytest.raises(SourceChanged, match=r"view public\.shown was another one when rows were read.*generation=2"):
        shop.plan(source, first)


@pytest.mark.promise("I12")
@pytest.mark.parametrize("rounding", ROUNDED)
def test_what_rounds_a_time_is_found(shop: Shop, rounding: str) -> None:
    """A row of this second is not read yet: another one, still to come, may get the same time."""
    statements, query, _ = ROUNDED[rounding]
    shop.execute(f"SELECT; {statements}")
    source = replace(DATED, table=None if query else "orders", query=query)
    shop.execute("SELECT pg_sleep(1.05 - extract(second FROM now()) % 1)")  # a time that is rounded down
    shop.sell()
    assert shop.plan(source) is None
    shop.execute("SELECT pg_sleep(1.1)")
    assert shop.planned(source)["rows"] == 1


@pytest.mark.promise("I12")
def test_a_time_that_is_rounded_too_far_is_refused(shop: Shop) -> None:
    """A row would be read long after it was written, or never; a view, a default and a trigger may round, too."""
    shop.execute(
        "CREATE FUNCTION hourly(timestamptz) RETURNS timestamptz LANGUAGE plpgsql AS"
        " $$ BEGIN RETURN date_trunc('hour', $1); END $$"
    )
    for expression in TOO_FAR:
        query = f"SELECT id, name, amount, {expression} AS written FROM orders"
        refused(shop, replace(DATED, table=None, query=query), SourceUnreadable, message="its time written is computed by")
    shop.execute("ALTER TABLE orders ALTER written SET DEFAULT date_trunc('month', now())")
    refused(shop, DATED, SourceUnreadable, message=r"computed by date_trunc\('month'")


@pytest.mark.promise("I12")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("rounding", ROUNDED)
@pytest.mark.parametrize("kind", ["opaque", "transactional"])
def test_a_rounded_time_before_its_transactions_start_is_read(shop: Shop, rounding: str, kind: str) -> None:
    """A writer is open, and its row has a time before its own start; others of the same second are read only after it."""
    statements, query, time = ROUNDED[rounding]
    shop.execute(f"SELECT; {statements}")
    source = replace(DATED, table=None if query else "orders", query=query, kind=kind, max_rows=5)
    shop.execute("SELECT pg_sleep(1.3 - extract(second FROM now()) % 1)")  # the middle of a second
    writer = shop.session()
    writer.execute("BEGIN")
    writer.execute("INSERT INTO orders (name) VALUES ('open')")
    shop.sell(20)
    read: list[int] = []
    previous = None
    for seconds in (2.5, 1.1):
        shop.execute("SELECT pg_sleep(%s)", [seconds])
        while metadata := shop.plan(source, previous):
            read += shop.ids(metadata, f"{time}, id")
            previous = metadata
        writer.execute("COMMIT")
    assert sorted(read) == [id_ for (id_,) in shop.execute("SELECT id FROM orders ORDER BY id")]
