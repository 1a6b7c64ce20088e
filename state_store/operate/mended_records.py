"""Operators' corrections of quarantined records, each kept beside the original for the replay that takes it up."""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.base.errors import RangeRefused, UnknownBatch, UsageError, storable
from tidegate.state_store.ledger import tables
from tidegate.state_store.ledger.batches import existing_input
from tidegate.state_store.ledger.cursors import check_in_service
from tidegate.state_store.ledger.schema_revision import rebuilds_in_service
from tidegate.state_store.operate.action_record import write_action

# As long as the longest bad record that the quarantine keeps whole.
MAX_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Mend:
    """What to read in a record's place, which operator says so, and why; `again` replaces an earlier correction."""

    payload: str
    owner: str
    reason: str
    again: bool = False


class Original(NamedTuple):
    """A record as it was set aside: where it stood, and its payload, which is raw or its columns as JSON."""

    origin: str | None
    payload: str
    is_raw: bool


def mend(connection: Connection, pipeline: str, txid: int, number: int, mended: Mend) -> Original:
    """Store the corrected payload beside the original, record the action, and return the original.

    The record's lock makes a second operator, or a later replay, see the correction.

    Raises: PipelineRetired; UnknownBatch if there is no such record; RangeRefused if the pipeline is a rebuild, the record is a
    partial that was set aside, a replay has taken it up, or it has a correction and `again` is not set; UsageError if the
    payload cannot be stored, or is not JSON of the record's columns where the original is.
    """
    check_in_service(connection, pipeline)
    if (rebuild := rebuilds_in_service(connection).get(pipeline)) is not None:
        raise RangeRefused(
            f"{pipeline} takes what is mended of {rebuild.pipeline}, so mend the record there: see tidegate quarantine list "
            f"{rebuild.pipeline} --txid {txid}"
        )
    check_storable(mended.payload)
    q = tables.quarantine.c
    this = (q.pipeline == pipeline, q.txid == txid, q.number == number)
    columns = (q.origin, q.payload, q.is_raw, q.state, q.replayed_txid, q.mended_at, q.mended_by, q.mended_reason)
    record = connection.execute(sa.select(*columns).where(*this).with_for_update()).one_or_none()
    if record is None:
        existing_input(connection, pipeline, txid)
        raise UnknownBatch(
            f"{pipeline} {txid} has no record {number} in quarantine. See: tidegate quarantine list {pipeline} --txid {txid}"
        )
    name = f"{pipeline} {txid}, record {number},"
    if record.state is not None:
        raise RangeRefused(
            f"{name} is not a bad record: it is what a batch would have brought to state {record.state}, and its commit has "
            "set it aside. It is neither mended nor replayed; it is kept so that you see what is missing there."
        )
    if record.replayed_txid is not None:
        raise RangeRefused(
            f"{name} was taken up by txid {record.replayed_txid}, so it is not mended. If it was still bad, it waits again "
            f"under that txid: tidegate quarantine list {pipeline} --txid {record.replayed_txid}"
        )
    if record.mended_at is not None and not mended.again:
        raise RangeRefused(
            f"{name} was mended on {record.mended_at:%Y-%m-%d %H:%M} UTC by {record.mended_by}: {record.mended_reason}. "
            "To replace that, say so: --again"
        )
    if not record.is_raw:
        check_columns(record.payload, mended.payload)
    values = {"mended_payload": mended.payload, "mended_by": mended.owner, "mended_reason": mended.reason}
    connection.execute(sa.update(tables.quarantine).where(*this).values(**values, mended_at=sa.func.clock_timestamp()))
    write_action(connection, pipeline, txid, "mend", mended.owner, f"record {number}: {mended.reason}")
    return Original(record.origin, record.payload, record.is_raw)


def check_storable(payload: str) -> None:
    """Refuse a payload that is empty, longer than MAX_BYTES, or no text that Postgres can keep.

    Raises: UsageError.
    """
    if "\0" in payload:
        raise UsageError("The mended record holds a NUL character, which Postgres cannot keep. Leave it out.")
    if not payload:
        raise UsageError("The mended record is empty. Give the whole record as it should have been.")
    if storable(payload) != payload:
        raise UsageError("The mended record is not UTF-8. Write it in UTF-8.")
    if (size := len(payload.encode())) > MAX_BYTES:
        raise UsageError(f"The mended record takes {size} bytes; the limit is {MAX_BYTES}.")


def check_columns(original: str, payload: str) -> None:
    """Refuse a payload that is not a JSON object of the original's columns. The replay checks whether values fit their types.

    Raises: UsageError.
    """
    columns = json.loads(original, parse_int=float)  # which takes any number of digits
    try:
        found = json.loads(payload, object_pairs_hook=_unique, parse_int=float, parse_constant=_refuse)
        what = "" if isinstance(found, dict) and found.keys() == columns.keys() else "it has others"
    except (ValueError, RecursionError) as error:
        what = str(error)
    if what:
        raise UsageError(f"The mended record has to be a JSON object of all its columns ({', '.join(columns)}): {what}.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a name twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
