"""Checks of whole batches, and of what they would make of the states: evaluated in the commit, before a batch counts.

A check is a query for what is wrong: no row means that all is well. The functions below make usual queries; any SELECT of
SQLAlchemy will do. Declaring a pipeline must not load SQLAlchemy, so it is imported where a query is made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import sqlalchemy as sa

    from tidegate.state_store.commit.author_checks import CheckedBatch
    from tidegate.state_store.declarations.pipeline_spec import PipelineSpec

Finds = Callable[["CheckedBatch"], "sa.Select[Any]"]


@dataclass(frozen=True)
class Check:
    """A condition on each batch: `finds` returns a query for what is wrong.

        Check(lambda batch: sa.select(batch.state("daily").c.carrier).where(batch.state("daily").c.flights < 0))

    With ``otherwise="block"`` the batch does not commit if a row is found, and waits for a person; with "warn", it does. With
    "quarantine", what is found of the batch's partials of the state `of` is set aside with the check's name, and the others
    count. Such a query selects from ``batch.partials(of)``, with the columns of the key, or the position of rows. It runs
    before the batch is merged into that state, so ``batch.state(of)`` is the state as it was.

    A check is code, and no part of what is registered: after a change, batches that wait are checked by the new one when they
    are tried again.
    """

    finds: Finds
    otherwise: Literal["block", "warn", "quarantine"] = "block"
    of: str | None = None

    def __post_init__(self) -> None:
        if self.otherwise not in ("block", "warn", "quarantine"):
            raise ValueError(f"A check has otherwise={self.otherwise!r}; use block, warn or quarantine.")
        if (self.otherwise == "quarantine") != (self.of is not None):
            raise ValueError(
                'A check with otherwise="quarantine" names the state whose partials are set aside, of=; others do not.'
            )


def check_declared(pipeline: str, checks: Mapping[str, Check], spec: "PipelineSpec") -> None:
    """Refuse a check that sets aside partials of an unknown state, of an update, or of a state with windows.

    Raises: ValueError.
    """
    for name, check in checks.items():
        if check.of is None:
            continue
        state = spec.state(check.of)
        if state is None or not state.is_table or state.window:
            raise ValueError(
                f"Pipeline {pipeline}: the check {name!r} sets aside partials of {check.of}. That has to be one of its states, "
                "and neither an update nor one with windows."
            )


def no_nulls(state: str, *columns: str) -> Finds:
    """Find what the batch brings to a state with NULL in one of these columns."""

    def finds(batch: "CheckedBatch") -> "sa.Select[Any]":
        import sqlalchemy as sa  # noqa: PLC0415

        partials = batch.partials(state)
        return sa.select(partials).where(sa.or_(*(partials.c[name].is_(None) for name in columns)))

    return finds


def between(state: str, column: str, least: Any = None, most: Any = None) -> Finds:
    """Find rows that the batch has changed in which a column of the state is now below or above a bound."""

    def finds(batch: "CheckedBatch") -> "sa.Select[Any]":
        import sqlalchemy as sa  # noqa: PLC0415

        after = batch.state(state)
        outside = [] if least is None else [after.c[column] < least]
        outside += [] if most is None else [after.c[column] > most]
        return sa.select(after).where(after.c.txid == batch.txid, sa.or_(sa.false(), *outside))

    return finds


def unique(state: str, *columns: str) -> Finds:
    """Find values of these columns that several rows of the state have, one of them from the batch."""

    def finds(batch: "CheckedBatch") -> "sa.Select[Any]":
        import sqlalchemy as sa  # noqa: PLC0415

        after, partials = batch.state(state), batch.partials(state)
        values = [after.c[name] for name in columns]
        of_batch = sa.select(*(partials.c[name] for name in columns))
        return sa.select(*values).where(sa.tuple_(*values).in_(of_batch)).group_by(*values).having(sa.func.count() > 1)

    return finds


def like_before(least: float | None = None, most: float | None = None, *, batches: int = 10) -> Finds:
    """Find out whether the batch has fewer or more source rows than these shares of the mean of the newest commits.

    Skipped batches and replays of quarantine are left out of the mean. The first batch always passes, and so does a replay,
    which has as many rows as waited.
    """

    def finds(batch: "CheckedBatch") -> "sa.Select[Any]":
        import sqlalchemy as sa  # noqa: PLC0415

        before = batch.before()
        newest = sa.select(before.c.source_rows).order_by(before.c.txid.desc()).limit(batches).subquery("newest")
        mean = sa.select(sa.func.avg(newest.c.source_rows)).scalar_subquery()
        rows = sa.literal(batch.source_rows, sa.BigInteger)
        numbers = sa.select(rows.label("source_rows"), sa.func.round(mean, 1).label("mean_before"))
        outside = [] if least is None else [rows < mean * least]
        outside += [] if most is None else [rows > mean * most]
        return numbers.where(sa.literal(not batch.is_replay), sa.or_(sa.false(), *outside))

    return finds
