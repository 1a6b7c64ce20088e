"""Only registered code runs: revisions, declarations and the incarnation of the database are compared."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.conftest import TALLY, Execute, Tally, contents
from tests.servers import Server
from tests.store import ColumnType, PipelineSpec, ValueColumn, registration, schema_revision
from tidegate import migrations
from tidegate.jobs import FixedBatches, Pipeline, Update
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import AccessRefused, DeclarationChanged, SchemaOutOfDate, StoreUnavailable, Unprocessed

Register = Callable[[PipelineSpec], bool]


# revisions


@pytest.mark.promise("error:SCHEMA_OUT_OF_DATE", "error:ACCESS_REFUSED")
def test_a_database_that_cannot_be_used_says_why(settings: Settings, server: Server, as_role: Execute) -> None:
    """Tidegate never migrates by itself, nor uses a ledger that another schema.sql has made."""
    name = server.create_database()
    try:
        with pytest.raises(SchemaOutOfDate, match=rf"Database {name} has no Tidegate tables\. Run: tidegate migrate"):
            StateStore.connect(replace(settings, pg_database=name))
    finally:
        server.drop_database(name)
    as_role("tidegate_owner", "UPDATE tidegate.alembic_version SET version_num = '0123456789ab'")
    for step in (lambda: StateStore.connect(settings), lambda: migrations.upgrade(settings, [])):
        with pytest.raises(SchemaOutOfDate, match=rf"\(schema.sql 0123456789ab\) than .* with \({schema_revision.DIGEST}\)"):
            step()
    with pytest.raises(StoreUnavailable, match=r"Start it \(tidegate up\) or check PGHOST and PGPORT"):
        StateStore.connect(replace(settings, pg_port=1))
    with pytest.raises(AccessRefused, match='database "gone" does not exist'):
        StateStore.connect(replace(settings, pg_database="gone"))
    with pytest.raises(AccessRefused):
        StateStore.connect(replace(settings, pg_user="unknown_user"))
    with pytest.raises(AccessRefused, match="password"):
        StateStore.connect(replace(settings, pg_passfile=Path("/nonexistent")))


# declarations


@pytest.fixture
def register_spec(settings: Settings) -> Register:
    """A function that registers a spec, whose tables exist, and returns whether anything was new."""

    def register(spec: PipelineSpec) -> bool:
        with migrations.connected(settings) as connection:
            return registration.register(connection, spec)

    return register


def _with_states(spec: PipelineSpec, **changes: object) -> PipelineSpec:
    return replace(spec, states=tuple(replace(state, **changes) for state in spec.states))


SPEC = TALLY.spec
MORE_VALUES = replace(SPEC.states[1], values=(*SPEC.states[1].values, ValueColumn("latest", ColumnType("bigint"), "max")))
ANOTHER_SOURCE = replace(SPEC, source_identity="elsewhere")
CHANGES = {
    "state removed": replace(SPEC, states=SPEC.states[:1]),
    "value added": replace(SPEC, states=(SPEC.states[0], MORE_VALUES)),
    "value type": _with_states(SPEC, values=(ValueColumn("sold", ColumnType("integer"), "sum"),)),
    "merge rule": _with_states(SPEC, values=(ValueColumn("sold", ColumnType("bigint"), "max"),)),
    "input column": _with_states(SPEC, values=(replace(SPEC.states[0].values[0], computed="sum(another)"),)),
}


@pytest.mark.promise("I16", "decision:0007")
def test_a_declaration_is_fixed_from_the_first_commit_on(tally: Tally, settings: Settings, register_spec: Register) -> None:
    """Existing values keep their meaning: the change is refused, and the old code goes on (I16)."""
    tally.plan(3)
    tally.process(1)
    tally.commit(1)
    tally.process(3)
    before = contents(settings)
    assert register_spec(SPEC) is False
    for changed in CHANGES.values():
        with pytest.raises(DeclarationChanged, match=r"tally has committed a batch into other states than these.*new names"):
            register_spec(replace(changed, version=2))
        with pytest.raises(DeclarationChanged, match="into other states than these"):
            migrations.new_revision(settings, [changed], "what could not be registered then")
    with pytest.raises(DeclarationChanged, match=r"tally has committed 1 batches from another source.*version above 1"):
        register_spec(ANOTHER_SOURCE)
    assert contents(settings) == before
    tally.process(2)
    tally.commit(2)

    raised = replace(ANOTHER_SOURCE, version=2)
    assert register_spec(raised) is True
    later = Tally(tally.store, raised)
    with pytest.raises(Unprocessed, match="another declaration"):
        later.commit(3)
    later.process(3)
    later.commit(3)
    assert register_spec(replace(raised, version=3)) is True
    assert tally.store.committed("tally") == 3


@pytest.mark.promise("I15")
def test_a_state_has_one_writer(tally: Tally, settings: Settings, register_spec: Register) -> None:
    """A second pipeline on the same table is refused before it can write (I15); so are two that exchange states."""
    outbox = Pipeline(
        "one", FixedBatches([], {"a": "int"}), states={"outbox": Update({"a": "integer"}, lambda _batch: None)}
    ).spec
    other = replace(SPEC, name="other", states=(replace(SPEC.states[1], name="per_month"),))
    for spec in (outbox, outbox, other):
        register_spec(spec)
    before = contents(settings)
    with pytest.raises(DeclarationChanged, match=r"State per_shop of pipeline two belongs to pipeline tally.*Rename one"):
        register_spec(replace(SPEC, name="two"))
    for second in (outbox, replace(SPEC, states=(replace(SPEC.states[0], name="outbox"),))):
        with pytest.raises(DeclarationChanged, match=r"State outbox of pipeline two belongs to pipeline one.*Rename one"):
            register_spec(replace(second, name="two"))
    exchanged = [replace(SPEC, states=other.states), replace(other, states=SPEC.states)]
    with pytest.raises(DeclarationChanged, match="per_month of pipeline tally belongs to pipeline other"):
        register_spec(exchanged[0])
    assert contents(settings) == before
