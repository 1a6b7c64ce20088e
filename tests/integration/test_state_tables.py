"""Tables that are not as declared: dropped, put back, moved, or with other columns, keys, triggers or rules."""

from dataclasses import replace
from functools import partial

import psycopg2
import pytest

from tests.integration.conftest import Tally
from tests.store import errors, state_tables
from tidegate import migrations
from tidegate.explain import remedies
from tidegate.state_store import StateStore

GUARD = [statement.format(table="state.per_shop") for statement in (state_tables.SINGLE_WRITER, state_tables.ALWAYS)]
GONE = r"table state\.per_shop is gone.* up to txid 2"


@pytest.fixture
def counted(tally: Tally) -> Tally:
    """Two batches have committed, a third is processed and a fourth planned."""
    return tally.having(4, 3, 2, days=[("2026-01-01", 1)])


@pytest.mark.promise("I9", "decision:0052")
def test_nothing_goes_on_without_its_table_or_with_another(counted: Tally) -> None:
    """It may lack rows; a migration, which has nothing to do about that, does not accept it, nor another declaration."""
    settings, specs = counted.store.settings, [counted.spec]
    counted.sql("CREATE TABLE public.form (LIKE state.per_shop INCLUDING ALL); DROP TABLE state.per_shop")
    steps = [partial(migrations.upgrade, settings, specs), partial(migrations.new_revision, settings, specs, "again")]
    counted.refuses(errors.HoleDetected, GONE, *counted.next_steps(3), *steps)
    for statement in (
        "CREATE TABLE state.per_shop (LIKE public.form INCLUDING ALL)",
        "GRANT SELECT, INSERT, UPDATE ON state.per_shop TO tidegate",
        *GUARD,
    ):
        counted.sql(statement)
    counted.refuses(errors.HoleDetected, r"tally: table state\.per_shop is another one .* up to txid 2", *counted.next_steps(3))

    changed = replace(counted.spec, source_identity=f"{counted.spec.source_identity} of today", version=2)
    migrations.upgrade(settings, specs)
    migrations.upgrade(settings, [changed])
    migrations.upgrade_all_but_broken(settings, [changed])
    with pytest.raises(errors.HoleDetected, match="is another one"):
        counted.store.commit_ready(changed, "test")


@pytest.mark.promise("I9")
@pytest.mark.parametrize(
    "changes",
    [
        ["DROP cents", "ADD cents bigint NOT NULL DEFAULT 0", "ALTER cents DROP DEFAULT"],
        ["DROP cents", "ADD cents bigint GENERATED ALWAYS AS (sold * 2) STORED"],
    ],
    ids=["made again", "generated"],
)
def test_another_column_of_the_name_is_not_added_to(counted: Tally, changes: list[str]) -> None:
    """Its values are not those of the committed batches, though the table looks as it is declared; a person may accept it."""
    for change in changes:
        counted.sql(f"ALTER TABLE state.per_shop {change}")
    settings, is_generated, commit = counted.store.settings, "GENERATED" in changes[-1], partial(counted.commit, 3)
    says = r"table state\.per_shop is another one .* or a column of it is"
    counted.refuses(errors.HoleDetected, says, *counted.next_steps(3))
    if not is_generated:  # else a migration is refused
        migrations.upgrade(settings, [counted.spec])
        counted.refuses(errors.HoleDetected, "or a column of it is", commit)
    assert migrations.accept_epoch(settings, "ann")
    if is_generated:
        says = r"column cents is bigint GENERATED AS \(sold \* 2\), not bigint"
        counted.refuses(errors.GuardMismatch, says, commit)
    else:
        assert commit().key_count == 2


OTHER = "CREATE OR REPLACE FUNCTION public.other() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN {} RETURN NEW; END'"
CALLS_OTHER = "FOR EACH ROW EXECUTE FUNCTION public.other()"
CHANGES = OTHER.format("NEW.cents := NEW.cents + 1;")
DROP_OTHER = "DROP FUNCTION public.other CASCADE"
EXCHANGE = "ALTER {} RENAME cents TO other; ALTER {} RENAME sold TO cents; ALTER {} RENAME other TO sold"
NEW_KEY = "ALTER {} DROP CONSTRAINT pk_per_shop; ALTER {} ADD CONSTRAINT pk_per_shop PRIMARY KEY (shop)"
TYPE = "ALTER {} ALTER cents TYPE numeric(5, 0)"
TRIGGER = f"{CHANGES}; CREATE TRIGGER other BEFORE INSERT OR UPDATE ON state.per_shop {CALLS_OTHER}"
NO_GUARD = "trigger single_writer of table state.per_shop is disabled or gone"
# What makes a table another one, what the error says, and what brings the declared one back: by default, what the error says.
DIFFERENCES = [
    ("ALTER {} RENAME TO of_before", GONE, "ALTER TABLE state.of_before RENAME TO per_shop"),
    ("ALTER {} SET SCHEMA public", GONE, "ALTER TABLE public.per_shop SET SCHEMA state"),
    (EXCHANGE, r"table state\.per_shop is another one .* or a column of it is", EXCHANGE),
    (TYPE, r"column cents is numeric\(5,0\), not bigint", "ALTER {} ALTER cents TYPE bigint"),
    (TRIGGER, r"it has trigger other of state.per_shop", DROP_OTHER),
    (
        'ALTER {} ALTER shop TYPE text COLLATE "POSIX"',
        r'column shop is text COLLATE "POSIX", not text COLLATE "C"',
        'ALTER {} ALTER shop TYPE text COLLATE "C"',
    ),
    ("ALTER {} RENAME cents TO euros", r"column cents \(bigint\) is gone", "ALTER {} RENAME euros TO cents"),
    (
        "ALTER {} ADD more int NOT NULL DEFAULT 1; ALTER {} ALTER more DROP DEFAULT",
        r"it has required more \(NOT NULL without a default\)",
        "ALTER {} DROP more",
    ),
    (NEW_KEY.partition(";")[0], r"key \(shop\) \(unique\) is gone", NEW_KEY.partition(";")[2]),
    (f"{NEW_KEY} DEFERRABLE", r"key \(shop\) is unique, deferrable, not unique", NEW_KEY),
    (
        f"{CHANGES}; DROP TRIGGER single_writer ON state.per_shop; "
        f"CREATE TRIGGER single_writer BEFORE INSERT ON state.per_shop {CALLS_OTHER}",
        NO_GUARD,
        "; ".join([DROP_OTHER, *GUARD]),
    ),
    ("ALTER {} ENABLE TRIGGER single_writer", "does not fire in every session.*ENABLE ALWAYS TRIGGER single_writer", GUARD[1]),
    (
        "ALTER {} ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON state.per_shop USING (cents < 15)",
        r"it has row-level security for tidegate \(hides rows: few \(cents < 15\)\)",
        "DROP POLICY few ON state.per_shop; ALTER {} DISABLE ROW LEVEL SECURITY",
    ),
    ("ALTER {} DISABLE TRIGGER single_writer", NO_GUARD, None),
    ("ALTER {} ENABLE REPLICA TRIGGER single_writer", NO_GUARD, None),
    ("ALTER {} DISABLE TRIGGER ALL", NO_GUARD, None),
    ("DROP TRIGGER single_writer ON state.per_shop", NO_GUARD, None),
    (
        "CREATE RULE other AS ON UPDATE TO state.per_shop DO INSTEAD NOTHING",
        "has rule other",
        "DROP RULE other ON state.per_shop",
    ),
    ("CREATE TABLE public.more () INHERITS (state.per_shop)", "it has child public.more", "DROP TABLE public.more"),
    (
        "ALTER {} ALTER cents ADD GENERATED ALWAYS AS IDENTITY",
        "column cents is bigint AS IDENTITY, not bigint",
        "ALTER {} ALTER cents DROP IDENTITY",
    ),
    ("ALTER {} SET UNLOGGED", r"it has unlogged state\.per_shop \(a crash of the server empties it\)", "ALTER {} SET LOGGED"),
    (
        "CREATE TABLE public.whole (cents bigint); ALTER {} INHERIT public.whole",
        r"it has parent public\.whole",
        "ALTER {} NO INHERIT public.whole; DROP TABLE public.whole",
    ),
]
TEAMS = """
ALTER {} ADD note text DEFAULT 'new', ADD twice bigint GENERATED ALWAYS AS (cents * 2) STORED;
CREATE UNIQUE INDEX ON state.per_shop (shop, cents);
CREATE INDEX ON state.per_shop (lower(shop)) WHERE cents > 0;
COMMENT ON COLUMN state.per_shop.cents IS 'of the shop';
GRANT SELECT ON state.per_shop TO PUBLIC;
ALTER {} ENABLE ROW LEVEL SECURITY;
CREATE POLICY all_rows ON state.per_shop USING (true);
CREATE POLICY few ON state.per_shop USING (cents < 15);
CREATE POLICY of_readers ON state.per_shop AS RESTRICTIVE TO tidegate_reader USING (cents < 15)
"""


def alter(tally: Tally, statements: str, **how: str) -> None:
    tally.sql(statements.replace("{}", "TABLE state.per_shop"), **how)


@pytest.mark.promise("I9", "I15", "decision:0052")
def test_nothing_goes_on_with_a_table_that_is_not_as_declared(counted: Tally) -> None:
    """A trigger that was disabled by hand, and forgotten, would let any program write. What a team adds is no difference."""
    noted = "SELECT state, table_oid = to_regclass('state.' || state)::oid FROM tidegate.state_table ORDER BY state"
    assert counted.sql(noted) == [("per_day", True), ("per_shop", True)]
    for made, difference, back in DIFFERENCES:
        alter(counted, made, role="postgres")
        refusal = counted.refuses((errors.HoleDetected, errors.GuardMismatch), f"tally: .*{difference}", *counted.next_steps(3))
        if back:
            alter(counted, back, role="postgres")
        else:
            counted.sql(refusal.partition("as the table's owner: ")[2])

    alter(counted, TEAMS)
    assert counted.commit(3).key_count == 2
    assert migrations.new_revision(counted.store.settings, [counted.spec], "unrelated") is None
    migrations.upgrade(counted.store.settings, [counted.spec])
    assert counted.sql("SELECT note, twice FROM state.per_shop") == [("new", 6)]
    with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="written by the commits of pipeline tally only"):
        counted.sql("SET session_replication_role = replica; UPDATE state.per_shop SET cents = 0", role="postgres")


def test_a_shape_that_a_person_accepts_counts_from_then_on(counted: Tally) -> None:
    settings, start = counted.store.settings, partial(counted.start, 4)
    for made in (TYPE, TRIGGER):
        alter(counted, made)
        migrations.accept_table(settings, "per_shop", "ann")
        assert migrations.new_revision(settings, [counted.spec], "unrelated") is None
        migrations.upgrade(settings, [counted.spec])
    assert counted.commit(3).key_count == 2
    by_type, by_trigger = counted.sql("SELECT action, owner, reason FROM tidegate.operator_action ORDER BY number")
    assert by_type[:2] == by_trigger[:2] == ("accept", "ann")
    assert "cents" in by_type[2]
    assert "trigger other" in by_trigger[2]
    alter(counted, CHANGES.replace("+ 1", "+ 2"))
    counted.refuses(errors.GuardMismatch, r"trigger other of state\.per_shop is", start)
    alter(counted, f"{CHANGES}; ALTER {{}} ALTER sold TYPE numeric(9, 0)")
    counted.refuses(errors.GuardMismatch, r"column sold is numeric\(9,0\), not", start)


@pytest.mark.parametrize(
    ("constraint", "shown"),
    [
        ("known CHECK (shop <> 'b')", r"constraint known.*Failing row contains \(b, "),
        ("once UNIQUE (cents)", r"constraint once.*Key \(cents\)=\(\d+\) already exists"),
    ],
)
def test_a_constraint_of_a_team_is_named_with_table_and_value(counted: Tally, constraint: str, shown: str) -> None:
    alter(counted, f"ALTER {{}} ADD CONSTRAINT {constraint}")
    counted.commit(3)
    counted.process(4, [("b", 7, 7, 7, 7), ("d", 7, 7, 7, 7)])
    says = rf"Table state\.per_shop refuses a row by its {shown}.*Drop it, or"
    with pytest.raises(errors.PermanentError, match=says) as refusal:
        counted.commit(4)
    assert type(refusal.value) is errors.PermanentError
    assert "inspect" not in remedies.fix_of_batch("PERMANENT_ERROR", "tally", 4)


@pytest.mark.promise("I15")
def test_what_an_event_trigger_gives_to_new_staging_tables_is_refused(tally: Tally) -> None:
    """It would change rows before their digest is taken."""
    for statement in (
        CHANGES,
        """CREATE FUNCTION public.noted() RETURNS event_trigger LANGUAGE plpgsql AS $$ DECLARE made text; BEGIN
            FOR made IN SELECT object_identity FROM pg_event_trigger_ddl_commands() WHERE object_identity ~ 'staging.per_shop'
            LOOP EXECUTE format('CREATE TRIGGER other BEFORE INSERT ON %s FOR EACH ROW EXECUTE FUNCTION public.other()', made);
            END LOOP; END $$""",
        "CREATE EVENT TRIGGER noted ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION public.noted()",
    ):
        tally.sql(statement, role="postgres")
    tally.plan()
    with pytest.raises(errors.GuardMismatch, match=r"new table staging\.per_shop_1_1 has trigger other, by an event trigger"):
        tally.start(1)
    tally.sql("DROP EVENT TRIGGER noted", role="postgres")
    tally.complete(1, [["Lisbon", 1, 5, 5, 5]])
    assert tally.state() == [("Lisbon", 1, 5, 5, 5, 1)]


# By what it is called: what a team has put on a table of the ledger, and how that goes.
ROW_SECURITY = "ALTER TABLE tidegate.{} {} ROW LEVEL SECURITY"
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
        f"row-level security of tidegate.{table}": tuple(ROW_SECURITY.format(table, how) for how in ("ENABLE", "DISABLE"))
        for table in ("attempt", "cursor", "pipeline")  # the last two make a pipeline look as if it were not registered
    },
}


@pytest.mark.promise("I19")
def test_nothing_goes_on_while_rows_of_the_ledger_are_not_found_or_kept(counted: Tally) -> None:
    """What a team's trigger does after a row, such as sending a notice of a commit, changes none."""
    counted.sql(OTHER.format("RAISE ''not today'';"), role="postgres")
    counted.sql(f"CREATE TRIGGER tells AFTER INSERT ON tidegate.commit {CALLS_OTHER}", role="postgres")
    says = r"committing tally 3: not today \(SQLSTATE P0001 in function other\(\)\)"
    counted.refuses(errors.PermanentError, says, partial(counted.commit, 3))
    counted.sql(OTHER.format("NOTIFY commits;"), role="postgres")
    settings = counted.store.settings
    for named, (made, gone) in IN_THE_WAY.items():
        counted.sql(made, role="postgres")
        counted.refuses(
            errors.SchemaOutOfDate,
            f"has {named}, a table of the ledger",
            *counted.next_steps(3),
            partial(StateStore.connect, settings),
            partial(migrations.upgrade, settings, [counted.spec]),
        )
        counted.sql(gone, role="postgres")
    assert counted.commit(3).txid == 3
