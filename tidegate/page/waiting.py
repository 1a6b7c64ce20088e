"""Why pipelines and batches wait, for the page."""

from collections.abc import Sequence

from sqlalchemy import Connection

from state_store import history, overview
from state_store.errors import UnknownBatch
from state_store.overview import Progress
from tidegate.page.models import Cause

IDLE = Cause(code="IDLE", sentence="Nothing to do.", severity="ok")


def root_causes(_connection: Connection, rows: Sequence[Progress]) -> dict[str, Cause]:
    """Return for each pipeline why it waits in the end."""
    return {row.pipeline: _waits(row) for row in rows}


def causes(connection: Connection, pipeline: str, txid: int | None) -> list[Cause]:
    """Return why a pipeline, or one of its batches, waits: first the nearest cause.

    Raises: UnknownPipeline, UnknownBatch.
    """
    row = overview.progress_of(connection, pipeline)
    if txid is None:
        return [] if _waits(row) is IDLE else [_waits(row)]
    found = history.batch_statuses(connection, pipeline, [txid], 1)
    if not found:
        raise UnknownBatch(f"{pipeline} has no txid {txid}.", pipeline=pipeline, txid=txid)
    if found[0].waits_for is None:
        return []
    return [Cause(code="WAITS", sentence=f"txid {txid} waits for {found[0].waits_for}.", txid=txid, severity="info")]


def _waits(row: Progress) -> Cause:
    if row.waits_for is None:
        return IDLE
    return Cause(code="WAITS", sentence=f"It waits for {row.waits_for}.", severity="info")
