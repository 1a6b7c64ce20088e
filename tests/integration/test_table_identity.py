"""Tables of states that are dropped, put back by themselves, or moved: rows of committed batches are never lost in silence."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.integration.conftest import Execute, Tally, contents
from tests.store import state_tables, tables
from tidegate import migrations
from tidegate.state_store.base.errors import GuardMismatch, HoleDetected

OWNER = "tidegate_owner"
GUARD = f"{state_tables.SINGLE_WRITER}; {state_tables.ALWAYS}".format(table="state.per_shop")


@pytest.fixture
def counted(tally: Tally) -> Tally:
    """Two batches have committed, a third is processed and a fourth planned."""
    tally.plan(4)
    for txid in (1, 2, 3):
        tally.process(txid, [("a", txid, 10 * txid, txid, txid)], [("2026-01-01", txid)])
    tally.commit(1)
    tally.commit(2)
    return tally


def put_back(as_role: Execute, rows: str) -> None:
    """Drop the table and make it again, as restoring this table alone does, with these rows."""
    as_role(OWNER, "CREATE TABLE public.dump AS TABLE state.per_shop")
    as_role(OWNER, "CREATE TABLE public.form (LIKE state.per_shop INCLUDING ALL)")
    as_role(OWNER, "DROP TABLE state.per_shop")
    as_role(OWNER, "CREATE TABLE state.per_shop (LIKE public.form INCLUDING ALL)")
    as_role(OWNER, f"INSERT INTO state.per_shop SELECT * FROM public.dump WHERE {rows}")
    as_role(OWNER, "GRANT SELECT, INSERT, UPDATE ON state.per_shop TO tidegate")
    as_role(OWNER, GUARD)


# What a pipeline does next: plan, begin an attempt, commit, and what an operator may do.
WAYS: dict[str, Callable[[Tally], object]] = {
    "commit": lambda tally: tally.commit(3),
    "commits": lambda tally: tally.store.commit_ready(tally.spec, "test"),
    "attempt": lambda tally: tally.start(4),
    "plan": lambda tally: tally.plan(run_id="another run"),
    "migrate": lambda tally: migrations.upgrade(tally.store.settings, [tally.spec]),
    "migrate --new": lambda tally: migrations.new_revision(tally.store.settings, [tally.spec], "again"),
}
LOSSES = {
    "dropped": "DROP TABLE state.per_shop",
    "renamed": "ALTER TABLE state.per_shop RENAME TO of_before",
    "moved": "ALTER TABLE state.per_shop SET SCHEMA public",
}


@pytest.mark.promise("I9", "decision:0052")
@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_goes_on_without_a_table(counted: Tally, as_role: Execute, loss: str) -> None:
    as_role(OWNER, LOSSES[loss])
    before = contents(counted.store.settings)

    for go_on in WAYS.values():
        with pytest.raises(HoleDetected, match=r"tally: table state\.per_shop is gone.* up to txid 2"):
            go_on(counted)

    assert contents(counted.store.settings) == before


@pytest.mark.promise("I9", "decision:0052")
def test_nothing_goes_on_with_a_table_that_was_put_back(counted: Tally, as_role: Execute) -> None:
    """It may lack rows; a migration, which has nothing to do about that, does not accept it, nor another declaration."""
    put_back(as_role, "false")
    before = contents(counted.store.settings)

    for name in ("commit", "commits", "attempt", "plan"):
        with pytest.raises(HoleDetected, match=r"tally: table state\.per_shop is another one .* up to txid 2"):
            WAYS[name](counted)
    assert contents(counted.store.settings) == before

    changed = replace(counted.spec, source_identity=f"{counted.spec.source_identity} of today", version=2)
    migrations.upgrade(counted.store.settings, [counted.spec])
    migrations.upgrade(counted.store.settings, [changed])
    migrations.upgrade_all_but_broken(counted.store.settings, [changed])
    with pytest.raises(HoleDetected, match="is another one"):
        counted.store.commit_ready(changed, "test")


@pytest.mark.promise("I9")
@pytest.mark.parametrize(
    "changes",
    [
        ["DROP cents", "ADD cents bigint NOT NULL DEFAULT 0", "ALTER cents DROP DEFAULT"],
        ["RENAME cents TO other", "RENAME sold TO cents", "RENAME other TO sold"],
        ["DROP cents", "ADD cents bigint GENERATED ALWAYS AS (sold * 2) STORED"],
    ],
    ids=["made again", "renamed", "generated"],
)
def test_another_column_of_the_name_is_not_added_to(counted: Tally, as_role: Execute, changes: list[str]) -> None:
    """Its values are not those of the committed batches, though the table looks as it is declared; a person may accept it."""
    for change in changes:
        as_role(OWNER, f"ALTER TABLE state.per_shop {change}")

    for goes_on in (lambda: counted.commit(3), lambda: counted.start(4), lambda: counted.plan(run_id="another run")):
        with pytest.raises(HoleDetected, match=r"table state\.per_shop is another one .* or a column of it is"):
            goes_on()
    settings, is_generated = counted.store.settings, "GENERATED" in changes[-1]
    if not is_generated:  # else a migration is refused
        migrations.upgrade(settings, [counted.spec])
        with pytest.raises(HoleDetected, match="or a column of it is"):
            counted.commit(3)
    assert migrations.accept_epoch(settings, "ann")
    if is_generated:
        with pytest.raises(GuardMismatch, match=r"column cents is bigint GENERATED AS \(sold \* 2\), not bigint"):
            counted.commit(3)
    else:
        assert counted.commit(3).key_count == 2


@pytest.mark.promise("I15")
def test_no_batch_commits_while_other_writers_are_not_refused(counted: Tally, as_role: Execute) -> None:
    """A trigger that was disabled or dropped for a change by hand, and forgotten, would let any program write.

    What the error says brings it back.
    """
    noted = as_role(OWNER, f"SELECT state, table_oid = to_regclass('state.' || state)::oid FROM {tables.LEDGER}.state_table")
    assert sorted(noted) == [("per_day", True), ("per_shop", True)]

    table = "ALTER TABLE state.per_shop"
    for statement in [
        f"{table} DISABLE TRIGGER single_writer",
        f"{table} ENABLE REPLICA TRIGGER single_writer",
        f"{table} DISABLE TRIGGER ALL",
        "DROP TRIGGER single_writer ON state.per_shop",
    ]:
        as_role("postgres", statement)
        refused = pytest.raises(GuardMismatch, match=r"trigger single_writer of table state\.per_shop is disabled or gone")
        with refused as refusal:
            counted.commit(3)
        as_role(OWNER, str(refusal.value).partition("as the table's owner: ")[2])
    assert counted.commit(3).txid == 3
