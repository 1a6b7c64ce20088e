"""A state's table with other columns, keys, triggers or rules than declared: nothing is merged until a person accepts it."""

from contextlib import closing

import psycopg2
import pytest

from tests.integration.conftest import Execute, Tally, contents
from tests.store import state_tables
from tidegate import migrations
from tidegate.explain import remedies
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import GuardMismatch, PermanentError, SchemaOutOfDate

OWNER = "tidegate_owner"
CHANGED = (
    """CREATE FUNCTION public.other() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.cents := NEW.cents + 1; RETURN NEW; END'"""
)
GUARD = [statement.format(table="state.per_shop") for statement in (state_tables.SINGLE_WRITER, state_tables.ALWAYS)]
# By the name of a shape: what makes it, what the error says, and what brings the declared shape back.
SHAPES = {
    "type": (
        ["ALTER {table} ALTER cents TYPE numeric(5, 0)"],
        r"column cents is numeric\(5,0\), not bigint",
        ["ALTER {table} ALTER cents TYPE bigint"],
    ),
    "collation": (
        ['ALTER {table} ALTER shop TYPE text COLLATE "POSIX"'],
        r'column shop is text COLLATE "POSIX", not text COLLATE "C"',
        ['ALTER {table} ALTER shop TYPE text COLLATE "C"'],
    ),
    "column": (
        ["ALTER {table} RENAME cents TO euros"],
        r"column cents \(bigint\) is gone",
        ["ALTER {table} RENAME euros TO cents"],
    ),
    "column to fill": (
        ["ALTER {table} ADD more int NOT NULL DEFAULT 1", "ALTER {table} ALTER more DROP DEFAULT"],
        r"it has required more \(NOT NULL without a default\)",
        ["ALTER {table} DROP more"],
    ),
    "key": (
        ["ALTER {table} DROP CONSTRAINT pk_per_shop"],
        r"key \(shop\) \(unique\) is gone",
        ["ALTER {table} ADD CONSTRAINT pk_per_shop PRIMARY KEY (shop)"],
    ),
    "trigger": (
        [
            CHANGED,
            "CREATE TRIGGER other BEFORE INSERT OR UPDATE ON state.per_shop FOR EACH ROW EXECUTE FUNCTION public.other()",
        ],
        r"it has trigger other of state.per_shop",
        ["DROP FUNCTION public.other CASCADE"],
    ),
    "trigger of the guard's name": (
        [
            CHANGED,
            "DROP TRIGGER single_writer ON state.per_shop",
            "CREATE TRIGGER single_writer BEFORE INSERT ON state.per_shop FOR EACH ROW EXECUTE FUNCTION public.other()",
        ],
        "trigger single_writer of table state.per_shop is disabled or gone",
        ["DROP FUNCTION public.other CASCADE", *GUARD],
    ),
    "guard in some sessions": (
        ["ALTER {table} ENABLE TRIGGER single_writer"],
        "does not fire in every session.*ENABLE ALWAYS TRIGGER single_writer",
        [GUARD[1]],
    ),
    "policy": (
        ["ALTER {table} ENABLE ROW LEVEL SECURITY", "CREATE POLICY few ON state.per_shop USING (cents < 15)"],
        r"it has row-level security for tidegate \(hides rows: few \(cents < 15\)\)",
        ["DROP POLICY few ON state.per_shop", "ALTER {table} DISABLE ROW LEVEL SECURITY"],
    ),
    "rule": (
        ["CREATE RULE other AS ON UPDATE TO state.per_shop DO INSTEAD NOTHING"],
        "it has rule other",
        ["DROP RULE other ON state.per_shop"],
    ),
    "child": (
        ["CREATE TABLE public.more () INHERITS (state.per_shop)"],
        "it has child public.more",
        ["DROP TABLE public.more"],
    ),
    "identity": (
        ["ALTER {table} ALTER cents ADD GENERATED ALWAYS AS IDENTITY"],
        "column cents is bigint AS IDENTITY, not bigint",
        ["ALTER {table} ALTER cents DROP IDENTITY"],
    ),
    "deferrable key": (
        ["ALTER {table} DROP CONSTRAINT pk_per_shop", "ALTER {table} ADD CONSTRAINT pk_per_shop PRIMARY KEY (shop) DEFERRABLE"],
        r"key \(shop\) is unique, deferrable, not unique",
        ["ALTER {table} DROP CONSTRAINT pk_per_shop", "ALTER {table} ADD CONSTRAINT pk_per_shop PRIMARY KEY (shop)"],
    ),
    "unlogged": (
        ["ALTER {table} SET UNLOGGED"],
        r"it has unlogged state\.per_shop \(a crash of the server empties it\)",
        ["ALTER {table} SET LOGGED"],
    ),
    "parent": (
        ["CREATE TABLE public.whole (cents bigint)", "ALTER {table} INHERIT public.whole"],
        r"it has parent public\.whole",
        ["ALTER {table} NO INHERIT public.whole", "DROP TABLE public.whole"],
    ),
}
TEAMS = [
    "ALTER {table} ADD note text DEFAULT 'new', ADD twice bigint GENERATED ALWAYS AS (cents * 2) STORED",
    "CREATE UNIQUE INDEX ON state.per_shop (shop, cents)",
    "CREATE INDEX ON state.per_shop (lower(shop)) WHERE cents > 0",
    "COMMENT ON COLUMN state.per_shop.cents IS 'of the shop'",
    "GRANT SELECT ON state.per_shop TO PUBLIC",
    "ALTER {table} ENABLE ROW LEVEL SECURITY",
    "CREATE POLICY all_rows ON state.per_shop USING (true)",
    "CREATE POLICY few ON state.per_shop USING (cents < 15)",
    "CREATE POLICY of_readers ON state.per_shop AS RESTRICTIVE TO tidegate_reader USING (cents < 15)",
]


def alter(as_role: Execute, *statements: str) -> None:
    for statement in statements:
        as_role(OWNER, statement.format(table="TABLE state.per_shop"))


@pytest.fixture
def counted(tally: Tally) -> Tally:
    tally.plan(3)
    for txid in (1, 2):
        tally.process(txid, [("a", txid, 10 * txid, txid, txid)], [("2026-01-01", txid)])
    tally.commit(1)
    return tally


@pytest.mark.promise("I15")
def test_nothing_goes_on_with_a_table_of_another_shape(counted: Tally, as_role: Execute) -> None:
    for shape, (statements, difference, back) in SHAPES.items():
        alter(as_role, *statements)
        before = contents(counted.store.settings)

        for goes_on in (lambda: counted.commit(2), lambda: counted.start(3), lambda: counted.plan(run_id="another run")):
            with pytest.raises(GuardMismatch, match=f"tally: .*{difference}"):
                goes_on()

        assert contents(counted.store.settings) == before, shape
        alter(as_role, *back)

    assert counted.commit(2).txid == 2


@pytest.mark.promise("I15")
def test_what_a_team_adds_is_no_difference_and_stays(counted: Tally, as_role: Execute) -> None:
    alter(as_role, *TEAMS)

    assert counted.commit(2).key_count == 2
    assert migrations.new_revision(counted.store.settings, [counted.spec], "unrelated") is None
    migrations.upgrade(counted.store.settings, [counted.spec])
    assert as_role(OWNER, "SELECT note, twice FROM state.per_shop") == [("new", 60)]
    with closing(psycopg2.connect(**counted.store.settings.conninfo(user="postgres"))) as connection:
        cursor = connection.cursor()
        cursor.execute("SET session_replication_role = replica")
        with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="written by the commits of pipeline tally only"):
            cursor.execute("UPDATE state.per_shop SET cents = 0")


def test_a_shape_that_a_person_accepts_counts_from_then_on(counted: Tally, as_role: Execute) -> None:
    settings = counted.store.settings
    for shape in ("type", "trigger"):
        alter(as_role, *SHAPES[shape][0])
        migrations.accept_table(settings, "per_shop", "ann")
        assert migrations.new_revision(settings, [counted.spec], "unrelated") is None
        migrations.upgrade(settings, [counted.spec])
    assert counted.commit(2).key_count == 2
    actions = as_role(OWNER, "SELECT action, owner, reason FROM tidegate.operator_action ORDER BY number")
    assert [action[:2] for action in actions] == [("accept", "ann")] * 2
    assert "cents" in actions[0][2]
    assert "trigger other" in actions[1][2]
    alter(as_role, CHANGED.replace("CREATE", "CREATE OR REPLACE").replace("+ 1", "+ 2"))
    with pytest.raises(GuardMismatch, match=r"trigger other of state\.per_shop is"):
        counted.start(3)
    alter(as_role, CHANGED.replace("CREATE", "CREATE OR REPLACE"))
    alter(as_role, "ALTER {table} ALTER sold TYPE numeric(9, 0)")
    with pytest.raises(GuardMismatch, match=r"column sold is numeric\(9,0\), not"):
        counted.start(3)


@pytest.mark.parametrize(
    ("constraint", "shown"),
    [
        ("ADD CONSTRAINT known CHECK (shop <> 'b')", r"constraint known.*Failing row contains \(b, "),
        ("ADD CONSTRAINT once UNIQUE (cents)", r"constraint once.*Key \(cents\)=\(\d+\) already exists"),
    ],
)
def test_a_constraint_of_a_team_is_named_with_table_and_value(
    counted: Tally, as_role: Execute, constraint: str, shown: str
) -> None:
    alter(as_role, f"ALTER TABLE state.per_shop {constraint}")
    counted.process(3, [("b", 7, 7, 7, 7), ("d", 7, 7, 7, 7)], [])
    counted.commit(2)
    with pytest.raises(PermanentError, match=rf"Table state\.per_shop refuses a row by its {shown}.*Drop it, or") as refusal:
        counted.commit(3)
    assert type(refusal.value) is PermanentError
    assert "inspect" not in remedies.fix_of_batch("PERMANENT_ERROR", "tally", 3)


@pytest.mark.promise("I15")
def test_what_an_event_trigger_gives_to_new_staging_tables_is_refused(tally: Tally, as_role: Execute) -> None:
    """It would change rows before their digest is taken."""
    for statement in (
        CHANGED,
        """CREATE FUNCTION public.noted() RETURNS event_trigger LANGUAGE plpgsql AS $$ DECLARE made text; BEGIN
            FOR made IN SELECT object_identity FROM pg_event_trigger_ddl_commands() WHERE object_identity ~ 'staging.per_shop'
            LOOP EXECUTE format('CREATE TRIGGER other BEFORE INSERT ON %s FOR EACH ROW EXECUTE FUNCTION public.other()', made);
            END LOOP; END $$""",
        "CREATE EVENT TRIGGER noted ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION public.noted()",
    ):
        as_role("postgres", statement)
    (txid,) = tally.plan()
    with pytest.raises(GuardMismatch, match=r"new table staging\.per_shop_1_1 has trigger other, by an event trigger"):
        tally.start(txid)
    as_role("postgres", "DROP EVENT TRIGGER noted")
    tally.process(txid, shops=[["Lisbon", 1, 5, 5, 5]])
    tally.commit(txid)
    assert tally.state() == [("Lisbon", 1, 5, 5, 5, 1)]


# By what it is called: what a team has put on a table of the ledger, and how that goes.
IN_THE_WAY = {
    "trigger nothing of tidegate.commit": (
        "CREATE FUNCTION public.nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; "
        "CREATE TRIGGER nothing BEFORE INSERT ON tidegate.commit FOR EACH ROW EXECUTE FUNCTION public.nothing()",
        "DROP FUNCTION public.nothing CASCADE",
    ),
    "rule other of tidegate.seal": (
        "CREATE RULE other AS ON INSERT TO tidegate.seal DO INSTEAD NOTHING",
        "DROP RULE other ON tidegate.seal",
    ),
    **{
        f"row-level security of tidegate.{table}": (
            f"ALTER TABLE tidegate.{table} ENABLE ROW LEVEL SECURITY",
            f"ALTER TABLE tidegate.{table} DISABLE ROW LEVEL SECURITY",
        )
        for table in ("attempt", "cursor", "pipeline")  # the last two make a pipeline look as if it were not registered
    },
}


@pytest.mark.promise("I19")
def test_nothing_goes_on_while_rows_of_the_ledger_are_not_found_or_kept(counted: Tally, as_role: Execute) -> None:
    """What a team's trigger does after a row, such as telling others of a commit, changes none."""
    settings = counted.store.settings
    as_role("postgres", CHANGED.replace("NEW.cents := NEW.cents + 1", "RAISE ''not today''"))
    as_role("postgres", "CREATE TRIGGER tells AFTER INSERT ON tidegate.commit FOR EACH ROW EXECUTE FUNCTION public.other()")
    with pytest.raises(PermanentError, match=r"committing tally 2: not today \(SQLSTATE P0001 in function other\(\)\)"):
        counted.commit(2)
    as_role("postgres", CHANGED.replace("NEW.cents := NEW.cents + 1", "NOTIFY commits").replace("CREATE", "CREATE OR REPLACE"))
    for named, (made, gone) in IN_THE_WAY.items():
        as_role("postgres", made)
        before = contents(settings)
        for goes_on in (
            lambda: counted.commit(2),
            lambda: counted.store.commit_ready(counted.spec, "test"),
            lambda: counted.start(3),
            lambda: counted.plan(run_id="another run"),
            lambda: StateStore.connect(settings),
            lambda: migrations.upgrade(settings, [counted.spec]),
        ):
            with pytest.raises(SchemaOutOfDate, match=f"has {named}, a table of the ledger"):
                goes_on()
        assert contents(settings) == before
        as_role("postgres", gone)
    assert counted.commit(2).txid == 2
