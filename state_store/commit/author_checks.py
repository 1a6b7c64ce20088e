"""Checks of a batch, evaluated in its commit: of its partials, and of the states as it would leave them.

A check is a query for what is wrong, so that its answer can be shown: no row means that all is well. If it finds something, the
batch does not commit ("block"), or commits and the ledger keeps what was found ("warn"), or commits without these partials
("quarantine").
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Table
from sqlalchemy.dialects.postgresql import insert

from tidegate.state_store.attempt.attempts import LockedBatch
from tidegate.state_store.base.errors import CheckFailed, DeclarationInvalid, TidegateError, class_and_text, skip_command
from tidegate.state_store.commit.quarantined_records import is_replay, set_aside, without_set_aside
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, StateSpec
from tidegate.state_store.ledger import tables
from tidegate.state_store.states import state_tables
from tidegate.state_store.states.state_tables import StagedBatch

SHOWN_ROWS, SHOWN_CHARACTERS = 3, 300
MOST_COUNTED = 10_000


@dataclass(frozen=True)
class CheckedBatch:
    """What a check may look at: the batch's partials, the states after it, and the batches before it.

    Tables are SQLAlchemy's. They are read in the transaction of the commit, after the batch was merged; by a check that sets
    partials aside, before that. `is_replay` says whether the batch takes up records of quarantine, not a slice
    of the source.
    """

    spec: PipelineSpec
    txid: int
    source_rows: int
    staged: Mapping[str, sa.Select[Any]]
    is_replay: bool = False

    @property
    def pipeline(self) -> str:
        """The name of the pipeline."""
        return self.spec.name

    def state(self, name: str) -> Table:
        """Return a state as the batch would leave it: keys, values, derived values and txid."""
        return state_tables.readable_of(self._state(name))

    def partials(self, name: str) -> sa.Subquery:
        """Return the batch's partials for a state: a row per key, or per appended row."""
        return self.staged[self._state(name).name].subquery(f"partials_{name}")

    def before(self) -> sa.Subquery:
        """Return the committed batches before this one, and how many rows their sources had: columns txid and source_rows.

        Those that were skipped, and replays of quarantine, are left out.
        """
        k, a = tables.commit.c, tables.attempt.c
        with_rows = sa.join(tables.commit, tables.attempt, tables.same_attempt(tables.attempt, tables.commit))
        earlier = sa.and_(k.pipeline == self.pipeline, k.txid < self.txid, k.skipped_reason.is_(None))
        slices = earlier & sa.not_(is_replay(self.pipeline, k.txid))
        return sa.select(k.txid, a.source_rows).select_from(with_rows).where(slices).subquery("before")

    def _state(self, name: str) -> StateSpec:
        state = self.spec.state(name)
        if state is None or not state.is_table:
            raise DeclarationInvalid(f"A check of pipeline {self.pipeline} looks at state {name}, which it does not have.")
        return state


def checked_batch(connection: Connection, spec: PipelineSpec, batch: LockedBatch) -> CheckedBatch:
    """Return what checks may look at, without the partials, which are added later."""
    a = tables.attempt.c
    rows = sa.select(a.source_rows).where(a.pipeline == spec.name, a.txid == batch.txid, a.attempt == batch.attempt)
    replay = bool(connection.scalar(sa.select(is_replay(spec.name, batch.txid))))
    return CheckedBatch(spec, batch.txid, connection.scalar(rows) or 0, {}, replay)


def evaluate(connection: Connection, batch: CheckedBatch) -> None:
    """Evaluate the checks of a merged batch that block or warn, and record what they found.

    Raises: CheckFailed with what was found, if a check blocks; DeclarationInvalid if one cannot be evaluated.
    """
    for name, check in batch.spec.checks:
        if check.otherwise == "quarantine":
            continue
        found = _found(connection, _statement(batch, name, check))
        if found and check.otherwise == "block":
            raise CheckFailed(
                f"{batch.pipeline} {batch.txid}: the check {name!r} finds {found}. Nothing was committed. Correct the "
                f"check, or the transform; or give the batch up: {skip_command(batch.pipeline, batch.txid)}"
            )
        _record(connection, batch, name, found)


def without_wrong(connection: Connection, batch: CheckedBatch, state: StateSpec, staged: StagedBatch) -> StagedBatch:
    """Move the partials for a state that its checks find into quarantine, before the merge; return the others.

    Raises: DeclarationInvalid if a check cannot be evaluated, or does not select the keys of the partials.
    """
    for name, check in batch.spec.checks:
        if check.of is None or batch.spec.state(check.of) != state:
            continue
        statement = _statement(replace(batch, staged={state.name: staged.partials}), name, check)
        wrong = _wrong_partials(batch, state, name, statement, staged.partials)
        found, rows = _found(connection, statement), 0
        if found:
            rows = set_aside(connection, batch.spec, state, batch.txid, wrong, partial(_reason, name))
            # Not by the check's query again: once the batch is merged, it may find other partials.
            others = without_set_aside(batch.spec, state, batch.txid, staged.partials)
            staged = staged._replace(rows=staged.rows - rows, partials=others)
        _record(connection, batch, name, f"{rows} set aside: {found}" if found else None)
    return staged


def _wrong_partials(
    batch: CheckedBatch, state: StateSpec, name: str, statement: sa.Select[Any], partials: sa.Select[Any]
) -> sa.Select[Any]:
    if missing := [key.name for key in state.keys if key.name not in statement.selected_columns]:
        raise DeclarationInvalid(
            f"The check {name!r} of pipeline {batch.pipeline} sets partials of {state.name} aside. Its query lacks column "
            f"{missing[0]}, by which they are found: it has to be over batch.partials({state.name!r})."
        )
    p, wrong = partials.subquery("partials"), statement.subquery("wrong")
    pairs = [(wrong.c[key.name], p.c[key.name], key.nullable) for key in state.keys]
    # For equality alone Postgres uses a hash join; otherwise it would compare each row with each other one.
    same = [one.is_not_distinct_from(other) if nullable else one == other for one, other, nullable in pairs]
    return sa.select(p).where(sa.exists(sa.select(sa.literal(1)).select_from(wrong).where(*same)))


def _reason(name: str, _partial: Any) -> sa.ColumnElement[str]:
    return sa.literal(f"the check {name!r} found it")


def _record(connection: Connection, batch: CheckedBatch, name: str, found: str | None) -> None:
    row = {"pipeline": batch.pipeline, "txid": batch.txid, "name": name, "found": found}
    connection.execute(insert(tables.check_result).values(row))


def _found(connection: Connection, statement: sa.Select[Any]) -> str | None:
    """Return the first rows that a check finds, and how many there are, as far as they are counted; None without any."""
    rows = connection.execute(statement.limit(SHOWN_ROWS + 1)).mappings()
    texts = [", ".join(f"{column}={value}" for column, value in row.items())[:SHOWN_CHARACTERS] for row in rows]
    if not texts:
        return None
    shown = f"({'), ('.join(texts[:SHOWN_ROWS])})"
    if len(texts) <= SHOWN_ROWS:
        return shown
    count = sa.select(sa.func.count()).select_from(statement.limit(MOST_COUNTED).subquery())
    number = connection.scalar(count) or 0
    return f"{shown} and more, {'at least ' if number == MOST_COUNTED else ''}{number:,} rows in all"


def _statement(batch: CheckedBatch, name: str, check: Any) -> sa.Select[Any]:
    place = f"The check {name!r} of pipeline {batch.pipeline}"
    try:
        statement = check.finds(batch)
    except TidegateError:
        raise
    except Exception as error:
        raise DeclarationInvalid(f"{place} failed: {class_and_text(error)}") from error
    if not isinstance(statement, sa.Select):
        raise DeclarationInvalid(f"{place} returns {type(statement).__name__}; it has to return a SELECT of SQLAlchemy.")
    return statement
