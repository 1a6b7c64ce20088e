"""Checks of a batch: conditions on its partials, and on the states as they would be, evaluated in its commit before it counts.

A check is a query for what is wrong, so that its answer can be shown: no row means that all is well. If it finds something, the
batch does not commit ("block"), or commits and the ledger keeps what was found ("warn").
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Table
from sqlalchemy.dialects.postgresql import insert

from state_store import tables
from state_store.declaration import PipelineSpec, StateSpec
from state_store.errors import CheckFailed, DeclarationInvalid, TidegateError

SHOWN_ROWS, SHOWN_CHARACTERS = 3, 300


@dataclass(frozen=True)
class CheckedBatch:
    """What a check may look at: the batch's partials, the states after it, and the batches before it.

    Tables are SQLAlchemy's. What is read belongs to the transaction of the commit, in which the batch is already merged.
    """

    spec: PipelineSpec
    txid: int
    source_rows: int
    staged: Mapping[str, sa.Select[Any]]

    @property
    def pipeline(self) -> str:
        """The name of the pipeline."""
        return self.spec.name

    def state(self, name: str) -> Table:
        """Return a state as it would be: keys, values, derived values and txid."""
        return tables.state_table_of(self._found(name))

    def partials(self, name: str) -> sa.Subquery:
        """Return what the batch brings to a state: a row per key, or per appended row."""
        return self.staged[self._found(name).name].subquery(f"partials_{name}")

    def before(self) -> sa.Subquery:
        """Return the committed batches before this one, and how many rows their sources had: columns txid and source_rows."""
        k, a = tables.commit.c, tables.attempt.c
        same = sa.and_(a.pipeline == k.pipeline, a.txid == k.txid, a.attempt == k.attempt)
        earlier = sa.and_(k.pipeline == self.pipeline, k.txid < self.txid, k.skipped_reason.is_(None))
        return sa.select(k.txid, a.source_rows).join(tables.attempt, same).where(earlier).subquery("before")

    def _found(self, name: str) -> StateSpec:
        state = self.spec.state(name)
        if state is None or not state.is_table:
            raise DeclarationInvalid(f"A check of pipeline {self.pipeline} looks at state {name}, which it does not have.")
        return state


def evaluate(connection: Connection, batch: CheckedBatch) -> None:
    """Evaluate the checks of a batch that has been merged, and record what they found.

    Raises: CheckFailed with what was found, if a check blocks; DeclarationInvalid if one cannot be evaluated.
    """
    for name, check in batch.spec.checks:
        found = _found(connection, batch, name, check)
        if found and check.otherwise == "block":
            raise CheckFailed(
                f"{batch.pipeline} {batch.txid}: the check {name!r} finds {_shown(found)}. Nothing was committed. Correct the "
                f"data or the check; or give the batch up: tidegate skip {batch.pipeline} {batch.txid}",
                pipeline=batch.pipeline,
                txid=batch.txid,
            )
        row = {"pipeline": batch.pipeline, "txid": batch.txid, "name": name, "found": _shown(found) if found else None}
        connection.execute(insert(tables.check_result).values(row))


def _found(connection: Connection, batch: CheckedBatch, name: str, check: Any) -> list[str]:
    """Return the first rows that a check finds, as texts."""
    place = f"The check {name!r} of pipeline {batch.pipeline}"
    try:
        statement = check.finds(batch)
    except TidegateError:
        raise
    except Exception as error:
        raise DeclarationInvalid(f"{place} failed: {type(error).__name__}: {error}") from error
    if not isinstance(statement, sa.Select):
        raise DeclarationInvalid(f"{place} returns {type(statement).__name__}; it has to return a SELECT of SQLAlchemy.")
    rows = connection.execute(statement.limit(SHOWN_ROWS + 1)).mappings()
    return [", ".join(f"{column}={value}" for column, value in row.items()) for row in rows]


def _shown(found: list[str]) -> str:
    more = " and more" if len(found) > SHOWN_ROWS else ""
    return f"({'), ('.join(text[:SHOWN_CHARACTERS] for text in found[:SHOWN_ROWS])}){more}"
