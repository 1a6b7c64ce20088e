"""Lets SQLAlchemy compile each statement once per process: by itself, it would once per database, so for every test."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.psycopg2 import PGDialect_psycopg2
from sqlalchemy.util import LRUCache

_compiled: LRUCache[object, object] = LRUCache(2000)


def compile_once() -> None:
    """Let all engines share what they have compiled; servers of another version have their own."""
    PGDialect_psycopg2.__eq__ = _is_same  # type: ignore[method-assign]
    PGDialect_psycopg2.__hash__ = lambda _: hash(PGDialect_psycopg2)  # type: ignore[method-assign]
    PGDialect_psycopg2.engine_created = _share  # type: ignore[method-assign]


def _is_same(one: PGDialect_psycopg2, other: object) -> bool:
    return isinstance(other, PGDialect_psycopg2) and one.server_version_info == other.server_version_info


def _share(engine: sa.Engine) -> None:
    engine.update_execution_options(compiled_cache=_compiled)
