"""Which registered pipelines follow a state: they read its changes, or its appended rows, by an input; and all others."""

from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, followed_as, parts_of, spec_of
from tidegate.state_store.ledger import tables


class Follower(NamedTuple):
    """A pipeline that reads a state's changes by one of its inputs ("" if it has one source), and its last committed txid."""

    pipeline: str
    input: str
    committed: int


def followers(connection: Connection, pipeline: str, state: str) -> list[Follower]:
    """Return the inputs of registered pipelines that follow a state; those of retired ones do not count."""
    p, k = tables.pipeline.c, tables.cursor.c
    identity = p.declaration["source_identity"].astext
    registered = connection.execute(
        sa.select(p.pipeline, k.txid, identity)
        .join(tables.cursor, k.pipeline == p.pipeline)
        .where(tables.IN_SERVICE)
        .order_by(p.pipeline)
    )
    followed = followed_as(pipeline, state)
    return [
        Follower(name, part, txid) for name, txid, of in registered for part, what in parts_of(of).items() if what == followed
    ]


def others(connection: Connection, pipeline: str) -> list[PipelineSpec]:
    """Return all other pipelines in service as they are registered, in the order of their names."""
    p = tables.pipeline.c
    declared = sa.select(p.declaration).where(p.pipeline != pipeline, tables.IN_SERVICE).order_by(p.pipeline)
    return list(map(spec_of, connection.scalars(declared)))
