"""The registration of pipelines, which changes of a declaration it refuses (DECLARATION_CHANGED), and grants on states."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import JSONB, OID, insert

from tidegate.state_store.base.errors import DeclarationChanged, PipelineRetired
from tidegate.state_store.connections import statement_text
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, StateSpec, followed_by, parts_of
from tidegate.state_store.ledger import batches, cursors, schema_revision, tables, undeclared_columns
from tidegate.state_store.ledger.cursors import Retired
from tidegate.state_store.pipeline_changes import declaration_changes, table_swap
from tidegate.state_store.states import history_state_view, range_partitions, state_tables, table_identity, table_shape


def register(connection: Connection, spec: PipelineSpec) -> bool:
    """Register a pipeline, with its states and cursor, for `tidegate migrate`; return whether the declaration is new.

    Once a batch has committed, states may not change, but for columns of rows that are kept as they came (`evolution`): an
    added state would miss earlier batches, a changed aggregate would give existing values another meaning. The source may. Both
    are confirmed by a higher `version`: committed batches are not read again.

    Raises: DeclarationChanged, also if another pipeline owns a state, or a new one has rows already; PipelineRetired, also if
    one whose states it reads is.
    """
    p = tables.pipeline.c
    known = connection.execute(sa.select(tables.pipeline).where(p.pipeline == spec.name).with_for_update()).one_or_none()
    if known:
        cursors.check_not_retired(spec.name, Retired(known.retired_at, known.retired_by, known.retired_reason))
    _check_owned(connection, spec)
    grant_queried(connection, spec)
    _grant_removal(connection, spec)
    undeclared_columns.forget_declared(connection, spec)
    if known and known.fingerprint == spec.fingerprint:
        _put_views(connection, spec, is_changed=False)
        _note_tables(connection, spec, is_changed=False)
        return False

    check_sources(connection, spec)
    _await_redo(connection, spec)
    committed = _check_change(connection, known, spec) if known else 0
    if not committed:
        _check_empty(connection, spec.name, spec.readable)
    replace_declaration(connection, spec)
    new_cursor = {"pipeline": spec.name, "txid": 0, "epoch": str(cursors.current_epoch(connection))}
    connection.execute(insert(tables.cursor).values(new_cursor).on_conflict_do_nothing())
    connection.execute(insert(tables.plan).values(pipeline=spec.name).on_conflict_do_nothing())
    return True


def replace_declaration(connection: Connection, spec: PipelineSpec) -> None:
    """Write the declaration of a pipeline, whatever was registered before, and let it own the tables that this declares."""
    row = {
        "pipeline": spec.name,
        "source_kind": spec.source_kind,
        "fingerprint": spec.fingerprint,
        "declaration": spec.declaration,
        # Each plan records these, too, but tasks of an earlier plan read them before.
        "in_flight": spec.window,
        "commits_alone": spec.commits_alone,
    }
    upsert = insert(tables.pipeline).values(row)
    connection.execute(upsert.on_conflict_do_update(index_elements=["pipeline"], set_={**row, "registered_at": sa.func.now()}))
    own(connection, spec)
    _put_views(connection, spec, is_changed=True)
    _note_tables(connection, spec, is_changed=True)


def _note_tables(connection: Connection, spec: PipelineSpec, *, is_changed: bool) -> None:
    """Divide the tables of a pipeline as is declared, note what they are to be like, and which they are.

    In this order: the last hides new ones.
    """
    table_swap.divide(connection, spec)
    table_shape.note(connection, spec, is_changed=is_changed)
    table_identity.note(connection, spec.name)


def _check_change(connection: Connection, known: sa.Row[Any], spec: PipelineSpec) -> int:
    """Refuse a declaration that changes the meaning of committed or planned batches; return the committed txid."""
    c = tables.cursor.c
    committed: int = connection.scalar(sa.select(c.txid).where(c.pipeline == spec.name).with_for_update()) or 0
    changed = declaration_changes.changed_fields(known.declaration, spec)
    if committed:
        declaration_changes.check_followers(connection, spec, declaration_changes.check(known.declaration, spec, committed))
    check_source_change(connection, known.declaration["source_identity"], known.source_kind, spec)
    if committed and "source_identity" in changed and spec.version <= known.declaration["version"]:
        raise DeclarationChanged(
            f"{spec.name} has committed {committed} batches from another source: "
            f"{declaration_changes.source_difference(known.declaration['source_identity'], spec.source_identity)}. "
            f"If the change is meant for the batches to come, raise the pipeline's version above "
            f"{known.declaration['version']}."
        )
    return committed


def check_states(connection: Connection, specs: Sequence[PipelineSpec]) -> None:
    """Refuse states that a pipeline could not be registered with, as batches have committed into others.

    Raises: DeclarationChanged.
    """
    for spec, declaration, committed in _committed(connection, specs):
        changes = declaration_changes.check(declaration, spec, committed)
        declaration_changes.check_followers(connection, spec, changes)
        for change in (change for change in changes if not change.is_update):
            _check_columns(connection, spec, change)


def _check_columns(connection: Connection, spec: PipelineSpec, change: declaration_changes.ColumnChange) -> None:
    """Refuse a new column that the team has filled, as it is NULL in earlier rows (I1), and to drop what divides rows."""
    state = next(state for state in spec.readable if state.name == change.state)
    for table in state_tables.tables_of(state):
        columns = sa.inspect(connection).get_multi_columns(schema=table.schema, filter_names=[table.name])
        found = {column["name"] for of_table in columns.values() for column in of_table}  # none of a table that is lost
        for name in found.intersection(change.added):
            if connection.scalar(sa.select(sa.exists().where(table.c[name].is_not(None)))):
                raise DeclarationChanged(
                    f"{spec.name}: {table.fullname} has a column {name} of your own, with values, and a declared one is NULL "
                    "in all rows that committed before. Declare one of another name, or drop yours."
                )
    if (divides := range_partitions.dividing_column(connection, state.name)) in change.dropped:
        raise DeclarationChanged(
            f"{spec.name}: {divides} divides state {state.name} by ranges, so it cannot be dropped. First declare the state "
            "without range_partitions, or with those of another column, and run: tidegate migrate"
        )


def column_changes(connection: Connection, specs: Sequence[PipelineSpec]) -> list[declaration_changes.ColumnChange]:
    """Return which columns a registration would give to, and take from, the states that batches have committed into."""
    return [
        change
        for spec, declaration, _ in _committed(connection, specs)
        for change in declaration_changes.column_changes(declaration, spec)
    ]


def lock_changed(connection: Connection, specs: Sequence[PipelineSpec]) -> None:
    """Lock the cursors of pipelines whose declaration changes, before a migration locks tables: commits lock in this order."""
    c = tables.cursor.c
    committed = _committed(connection, specs)
    changed = [spec.name for spec, declaration, _ in committed if declaration_changes.changed_fields(declaration, spec)]
    if changed:
        connection.execute(sa.select(c.txid).where(c.pipeline.in_(changed)).order_by(c.pipeline).with_for_update())


def _committed(connection: Connection, specs: Sequence[PipelineSpec]) -> list[tuple[PipelineSpec, Mapping[str, Any], int]]:
    """Return the pipelines that have committed, with their registered declaration and txid; none without a ledger."""
    p, c = tables.pipeline.c, tables.cursor.c
    if not schema_revision.has_ledger(connection):
        return []
    statement = sa.select(p.pipeline, p.declaration, c.txid).join(tables.cursor, p.pipeline == c.pipeline).where(c.txid > 0)
    known = {name: (declaration, committed) for name, declaration, committed in connection.execute(statement)}
    return [(spec, *known[spec.name]) for spec in specs if spec.name in known]


def check_sources(connection: Connection, spec: PipelineSpec) -> None:
    """Refuse a pipeline that reads the states of a retired one, which never change again.

    Raises: PipelineRetired.
    """
    p = tables.pipeline.c
    read = sa.select(p.pipeline).where(p.pipeline.in_(spec.read_pipelines), ~tables.IN_SERVICE).order_by(p.pipeline)
    if gone := list(connection.scalars(read)):
        raise PipelineRetired(
            f"{spec.name} follows or reads states of {' and '.join(gone)}, and {gone[0]} was retired: its states never change "
            f"again. Declare {spec.name} without them; or first run: tidegate reinstate {gone[0]}"
        )


def check_new_states(connection: Connection, before: PipelineSpec, spec: PipelineSpec) -> None:
    """Refuse names of states that another pipeline owns, and tables with rows for states that a pipeline did not have `before`.

    Raises: DeclarationChanged.
    """
    _check_owned(connection, spec)
    _check_empty(connection, spec.name, [state for state in spec.readable if before.state(state.name) is None])


def _check_empty(connection: Connection, pipeline: str, states: Sequence[StateSpec]) -> None:
    """Refuse tables with rows before the pipeline's first commit: these would count, too."""
    for name in (table for state in states for table in (state.table_name, state.records) if table):
        table = sa.table(name, schema=state_tables.STATE)
        exists = connection.scalar(sa.select(sa.func.to_regclass(f"{state_tables.STATE}.{name}"))) is not None
        if exists and connection.scalar(sa.select(sa.exists().select_from(table))):
            raise DeclarationChanged(
                f"Table state.{name} has rows, and pipeline {pipeline} would begin that state: it would count on top of them. "
                "Give the state another name; or drop the table, if its rows are not needed."
            )


def _await_redo(connection: Connection, spec: PipelineSpec) -> None:
    """Wait for redos of the pipelines whose states this one follows; later ones look for followers once it is registered."""
    c = tables.cursor.c
    followed = sa.select(c.txid).where(c.pipeline.in_(followed_by(spec.source_identity) - {spec.name})).order_by(c.pipeline)
    connection.execute(followed.with_for_update(read=True))


def retired(connection: Connection, specs: Sequence[PipelineSpec]) -> dict[str, str]:
    """Return a sentence for each of these pipelines that was retired; none without a ledger."""
    p = tables.pipeline.c
    if not schema_revision.has_ledger(connection):
        return {}
    statement = sa.select(p.pipeline, tables.HAS_DROPPED, *cursors.RETIRED).where(p.pipeline.in_([spec.name for spec in specs]))
    sentences = {}
    for name, has_dropped, *when in connection.execute(statement.where(~tables.IN_SERVICE).order_by(p.pipeline)):
        at, by, reason = Retired(*when)
        back = "" if has_dropped else f"; or let it go on where it stood: tidegate reinstate {name}"
        sentences[name] = (
            f"Pipeline {name} is declared, and left out: {by} retired it on {at:%Y-%m-%d} ({reason}). Take its file away, or "
            f"give a new pipeline another name{back or '.'}"
        )
    return sentences


def _owners(connection: Connection, spec: PipelineSpec) -> list[tuple[str, str]]:
    """Return which of a pipeline's tables, and updates, which are staged by name, registered pipelines own, with the owners."""
    p, s, names = tables.pipeline.c, tables.state_table.c, {*spec.tables, *(state.name for state in spec.states)}
    states = sa.func.jsonb_array_elements(p.declaration["states"]).table_valued(sa.column("value", JSONB)).lateral("states")
    declared = states.c.value["name"].astext
    of_states = sa.select(declared, p.pipeline).join_from(tables.pipeline, states, sa.true()).where(declared.in_(names))
    of_tables = sa.select(s.state, s.pipeline).where(s.state.in_(names))
    return [(name, owner) for found in (of_states, of_tables) for name, owner in connection.execute(found)]


def _check_owned(connection: Connection, spec: PipelineSpec) -> None:
    """Refuse names that another pipeline owns."""
    p = tables.pipeline.c
    for state, owner in _owners(connection, spec):
        if owner != spec.name:
            when = connection.scalar(sa.select(p.retired_at).where(p.pipeline == owner))
            why = "a state has one writer" if when is None else "that was retired, and the names of its states stay taken"
            raise DeclarationChanged(
                f"State {state} of pipeline {spec.name} belongs to pipeline {owner}: {why}. "
                f"{'Rename one of them.' if when is None else 'Give it another name.'}"
            )


def own(connection: Connection, spec: PipelineSpec) -> None:
    """Let a pipeline own the tables that it declares, and no others."""
    s = tables.state_table.c
    # Rows that stay keep the txid up to which changes were removed. A state is given away only before its pipeline's first
    # commit, so nothing was removed of it.
    connection.execute(sa.delete(tables.state_table).where(s.pipeline == spec.name, s.state.not_in(spec.tables)))
    if new := [{"state": table, "pipeline": spec.name} for table in spec.tables]:
        connection.execute(insert(tables.state_table).values(new).on_conflict_do_nothing())


def check_source_change(connection: Connection, identity: str, kind: str, spec: PipelineSpec) -> None:
    """Refuse a change of the source, which was of this identity and kind, by which a planned batch or a position is lost.

    Raises: DeclarationChanged, MetadataCorrupt.
    """
    _check_inputs(connection, identity, spec)
    _check_planned(connection, kind, spec)


def _check_inputs(connection: Connection, before: str, spec: PipelineSpec) -> None:
    """Refuse a change by which the ledger loses an input's position, so that it would be read from its beginning."""
    was, now = parts_of(before), parts_of(spec.source_identity)
    b = tables.batch.c
    if was == now or connection.scalar(sa.select(b.txid).where(b.pipeline == spec.name).limit(1)) is None:
        return
    if ("" in was) != ("" in now):
        kind = "one source" if "" in was else "several inputs"
        raise DeclarationChanged(
            f"{spec.name} has batches of {kind}: {before}. Neither can go on where the other has ended. "
            "Give the pipeline and its states new names, or take the change back."
        )
    for name in sorted(now.keys() - was.keys()):
        if renamed := [gone for gone in sorted(was.keys() - now.keys()) if was[gone] == now[name]]:
            raise DeclarationChanged(
                f"{spec.name}: input {renamed[0]} is called {name} now. The ledger knows its position by its name, so it would "
                f"be read from its beginning. Call it {renamed[0]} again."
            )


def _check_planned(connection: Connection, before: str, spec: PipelineSpec) -> None:
    """Refuse to call a source transactional while a planned batch no longer continues the one before it.

    A transactional source never plans a batch again, so it could neither commit nor be skipped.
    """
    if before == spec.source_kind or spec.source_kind != "transactional":
        return
    batches.lock_open(connection, spec.name, sa.true())  # so that none is planned again meanwhile
    planned = batches.uncommitted_inputs(connection, spec.name, batches.MAX_TXID)
    if planned and planned[0].txid > 1:
        planned.insert(0, batches.existing_input(connection, spec.name, planned[0].txid - 1))  # the last committed
    for earlier, later in pairwise(planned):
        if later.continues != earlier.digest:
            raise DeclarationChanged(
                f"{spec.name} {later.txid} has to be planned again, as txid {earlier.txid} was, and a transactional source "
                "never does that. Give the pipeline and its states new names, or take the change back."
            )


def grant_queried(connection: Connection, spec: PipelineSpec) -> None:
    """Let Spark's tasks read the states that a pipeline's transform reads, if their tables exist."""
    for query in spec.queries:
        if is_readable(connection, query.state, state_tables.STAGER) is False:
            statement_text.ddl(
                connection, state_tables.GRANT_SELECT_TO_STAGER.format(table=f"{state_tables.STATE}.{query.state}")
            )


def _grant_removal(connection: Connection, spec: PipelineSpec) -> None:
    """Let commits remove the windows of states that do not keep all of them."""
    for state in spec.states:
        if state.window and state.window.keep is not None:
            statement_text.ddl(connection, state_tables.GRANT_DELETE.format(table=f"{state_tables.STATE}.{state.table_name}"))


def is_readable(connection: Connection, state: str, role: str) -> bool | None:
    """Return whether a role may read a state's table; None if there is no such table."""
    table = sa.cast(sa.func.to_regclass(f"{state_tables.STATE}.{state}"), OID)
    return connection.scalar(sa.select(sa.func.has_table_privilege(role, table, "SELECT")))


def _put_views(connection: Connection, spec: PipelineSpec, *, is_changed: bool) -> None:
    for state in spec.readable:
        if state.history:
            history_state_view.put_view(connection, state, state_tables.state_table_of(state), is_changed=is_changed)
