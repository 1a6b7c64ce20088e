"""Routes for bad records that were set aside: look at them, mend one. Replaying them is an action."""

import re
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from tidegate import operator_actions
from tidegate.page import access, ledger_connection
from tidegate.page.http_answers import Refusal, body_of
from tidegate.page.shared_models import LARGEST, REASON_CHARACTERS, Number, Txid
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.commit import quarantined_records as ledger_quarantine
from tidegate.state_store.operate.mended_records import MAX_BYTES, Mend

router = APIRouter(prefix="/api/pipelines/{pipeline}/quarantine")
TXIDS_SHOWN = 100


class QuarantinedRecord(BaseModel):
    """A bad record, or a partial of a `state` that a commit has set aside.

    In a list, payloads are cut (`is_cut`): a record of its own has all of them. Partials are neither mended nor replayed.
    """

    txid: int
    number: int
    state: str | None
    reason: str
    origin: str | None
    payload: str
    is_raw: bool
    quarantined_at: datetime
    replayed_txid: int | None
    mended_payload: str | None
    mended_at: datetime | None
    mended_by: str | None
    mended_reason: str | None
    is_cut: bool = False


class Quarantine(BaseModel):
    """Records in the order of txid and number; how many wait in all, and how many there are by txid, the newest first."""

    total: int
    set_aside: int
    by_txid: list[tuple[int, int]]
    next: str | None
    records: list[QuarantinedRecord]


class Mended(BaseModel):
    """What is to be read in a record's place, and why; `again` replaces an earlier mend."""

    model_config = ConfigDict(extra="forbid")

    payload: str = Field(max_length=MAX_BYTES)
    reason: str = Field(max_length=REASON_CHARACTERS)
    again: bool = False


class Nothing(BaseModel):
    """An answer without content."""


@router.get("")
def quarantine(
    pipeline: access.Readable,
    txid: Txid = None,
    after: Annotated[str | None, Query(max_length=50)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Quarantine:
    """Return some of the records that wait."""
    with ledger_connection.snapshot_of(pipeline, f"reading the quarantine of {pipeline}") as connection:
        found = ledger_quarantine.page_of_records(connection, pipeline, txid, _place(after), limit + 1)
        totals = ledger_quarantine.totals(connection, pipeline, txid)
        by_txid = list(ledger_quarantine.counts(connection, pipeline, None, limit=TXIDS_SHOWN).items())
    shown = [QuarantinedRecord(**record) for record in found[:limit]]
    return Quarantine(
        total=totals.waiting,
        set_aside=totals.set_aside,
        by_txid=by_txid,
        next=f"{shown[-1].txid}-{shown[-1].number}" if len(found) > limit else None,
        records=shown,
    )


@router.get("/{txid}/{number}")
def record(pipeline: access.Readable, txid: Number, number: Number) -> QuarantinedRecord:
    """Return one record with its whole payload."""
    with ledger_connection.snapshot_of(pipeline, f"reading a record of {pipeline} {txid}") as connection:
        found = ledger_quarantine.record(connection, pipeline, txid, number)
    if found is None:
        raise Refusal(404, "UNKNOWN_RECORD", f"{pipeline} {txid} has no record {number} in quarantine.")
    return QuarantinedRecord(**found)


@router.post("/{txid}/{number}")
def mend(
    pipeline: access.Changeable, txid: Number, number: Number, user: access.User, mended: Annotated[Mended, body_of(Mended)]
) -> Nothing:
    """Keep a correction of a record beside it, for the replay that takes it up."""
    reason = operator_actions.require_reason(mended.reason)
    with StateStore.connect(ledger_connection.settings()) as store:
        store.mend_quarantined(pipeline, txid, number, Mend(mended.payload, access.owner(user, "mend"), reason, mended.again))
    return Nothing()


def _place(after: str | None) -> tuple[int, int] | None:
    if after is None:
        return None
    place = re.fullmatch(r"([0-9]{1,16})-([0-9]{1,16})", after)
    if place is None or max(map(int, place.groups())) > LARGEST:
        raise UsageError("`after` is not what an earlier answer called `next`.")
    return int(place[1]), int(place[2])
