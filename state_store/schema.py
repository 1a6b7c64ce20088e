"""Which migration the code needs, which one the database has, and the registration of pipelines."""

import json
from collections.abc import Sequence
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from state_store import commits, tables
from state_store.declaration import PipelineSpec
from state_store.errors import DeclarationChanged, SchemaOutOfDate

VERSIONS = Path(__file__).resolve().parent.parent / "migrations" / "versions"
VERSION_TABLE = "alembic_version"
_version = sa.table(VERSION_TABLE, sa.column("version_num"), schema=tables.LEDGER)


def head_revision() -> str:
    """Return the newest revision: migrations are numbered and form one line, so the last file name tells it."""
    return max(file.name[:4] for file in VERSIONS.glob("[0-9]*.py"))


def current_revision(connection: Connection) -> str | None:
    """Return the database's revision; None if Tidegate has no tables there."""
    exists = connection.scalar(sa.select(sa.func.to_regclass(f"{tables.LEDGER}.{VERSION_TABLE}")))
    return connection.scalar(sa.select(_version.c.version_num)) if exists else None


def check_not_newer(connection: Connection) -> None:
    """Refuse a database that newer code has migrated.

    Raises: SchemaOutOfDate.
    """
    _check_not_newer(connection, current_revision(connection))


def check_revision(connection: Connection) -> None:
    """Refuse a database that is behind or ahead of this code.

    Raises: SchemaOutOfDate with the command to type.
    """
    found = current_revision(connection)
    if found == (head := head_revision()):
        return
    _check_not_newer(connection, found)
    database = connection.scalar(sa.select(sa.func.current_database()))
    if found is None:
        raise SchemaOutOfDate(f"Database {database} has no Tidegate tables. Run: tidegate migrate")
    raise SchemaOutOfDate(f"Database {database} is at revision {found}, this code needs {head}. Run: tidegate migrate")


def _check_not_newer(connection: Connection, found: str | None) -> None:
    if found is not None and found > (head := head_revision()):
        database = connection.scalar(sa.select(sa.func.current_database()))
        raise SchemaOutOfDate(f"Database {database} is at revision {found}, newer than this code ({head}). Update the code.")


def register(connection: Connection, spec: PipelineSpec) -> bool:
    """Write down a pipeline, its states and its cursor; return whether anything is new. Part of `tidegate migrate`.

    Once a batch has committed, states may not change: an added one would miss the batches before it, and a changed
    aggregate would give the values that are there another meaning (CONTRACT I1, I16). The source may, such as when its files
    get a new column, if `version` is raised to say that this is meant: what has committed stays as it was read.

    Raises: DeclarationChanged.
    """
    p, c, s = tables.pipeline.c, tables.cursor.c, tables.state_table.c
    known = connection.execute(sa.select(tables.pipeline).where(p.pipeline == spec.name).with_for_update()).one_or_none()
    declared = [state.name for state in spec.states]
    owned = connection.execute(sa.select(s.state, s.pipeline).where(s.state.in_(declared))).all()
    for state, owner in owned:
        if owner != spec.name:
            raise DeclarationChanged(
                f"State {state} of pipeline {spec.name} belongs to pipeline {owner}: a state has one writer. "
                "Rename one of them.",
                pipeline=spec.name,
            )
    if known and known.fingerprint == spec.fingerprint:
        return False

    if known:
        committed = connection.scalar(sa.select(c.txid).where(c.pipeline == spec.name).with_for_update())
        declaration = _as_json(spec)
        changed = {name for name, value in known.declaration.items() if declaration.get(name) != value}
        if committed and changed - {"version", "source_identity"}:
            raise DeclarationChanged(
                f"{spec.name} has committed {committed} batches into other states than these. Give the pipeline and its states "
                "new names, or take the change back.",
                pipeline=spec.name,
            )
        if committed and "source_identity" in changed and spec.version <= known.declaration["version"]:
            raise DeclarationChanged(
                f"{spec.name} has committed {committed} batches from another source: {known.declaration['source_identity']}. "
                f"If the change is meant for the batches to come, raise the pipeline's version above "
                f"{known.declaration['version']}.",
                pipeline=spec.name,
            )
    row = {
        "pipeline": spec.name,
        "source_kind": spec.source_kind,
        "fingerprint": spec.fingerprint,
        "declaration": spec.declaration,
    }
    upsert = insert(tables.pipeline).values(row)
    connection.execute(upsert.on_conflict_do_update(index_elements=["pipeline"], set_={**row, "registered_at": sa.func.now()}))
    connection.execute(sa.delete(tables.state_table).where(s.pipeline == spec.name))
    connection.execute(
        insert(tables.state_table).values([{"state": state.name, "pipeline": spec.name} for state in spec.states])
    )
    new_cursor = {"pipeline": spec.name, "txid": 0, "epoch": commits.current_epoch(connection)}
    connection.execute(insert(tables.cursor).values(new_cursor).on_conflict_do_nothing())
    return True


def accept_epoch(connection: Connection) -> Sequence[str]:
    """Let all pipelines go on in this incarnation of the database; return those that were halted by it."""
    epoch = commits.current_epoch(connection)
    c = tables.cursor.c
    return list(connection.scalars(sa.update(tables.cursor).where(c.epoch != epoch).values(epoch=epoch).returning(c.pipeline)))


def _as_json(spec: PipelineSpec) -> dict[str, object]:
    return dict(json.loads(json.dumps(spec.declaration)))
