"""Refuses keys and values that Postgres could not store, with the state, the column and the key: nothing is dropped or cut."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.state_store.base.errors import BadKey, Overflow
from tidegate.state_store.declarations.column_spec import DAYS, TICKS
from tidegate.state_store.declarations.pipeline_spec import Staged, StateSpec
from tidegate.state_store.declarations.window_spec import WINDOW_START

# An index row holds 2,704 bytes after compression; an explicit limit does not depend on how well a key compresses.
MAX_KEY_BYTES = 2000
# For all columns of a key together; Postgres takes at most 32 into an index, each with up to 7 bytes of its own.
MAX_KEYS_BYTES = 2400
SHOWN_KEY_CHARACTERS = 40
MAX_VALUE_BYTES = 64 * 1024 * 1024


def check_storable(staged: Staged, batch: pa.RecordBatch) -> None:
    """Refuse partials of a state, or bad records, with a key or a value that cannot be stored.

    Raises: BadKey, Overflow.
    """
    for key in staged.keys:
        if not key.nullable and (nulls := batch.column(key.name).null_count):
            raise BadKey(_why_not_null(staged, key.name, nulls))
    for name in staged.required:
        if nulls := batch.column(name).null_count:
            raise BadKey(
                f"State {staged.name}: column {name}, by which its rows are divided, is NULL in {nulls} row(s). "
                "Filter such rows in the transform, or give them a value there."
            )
    _check_sizes(staged, batch)
    for column in staged.columns:
        _check_years(staged, batch, column.name)


def _why_not_null(staged: Staged, key: str, nulls: int) -> str:
    history = staged.history if isinstance(staged, StateSpec) else None
    if key == WINDOW_START:
        what, otherwise = f"the event time is NULL in {nulls} group(s), which are in no window", "give them a time there"
    elif history and key in history.order:
        what = f"column {key} of order_by is NULL in {nulls} version(s), which have no place in the history"
        otherwise = "give them a value there"
    else:
        what = f"key column {key} is NULL in {nulls} group(s)"
        otherwise = "declare null_keys=True to keep them as a group"
    return f"State {staged.name}: {what}. Filter such rows in the transform, or {otherwise}."


def _check_sizes(staged: Staged, batch: pa.RecordBatch) -> None:
    """Refuse a text or bytes that Postgres cannot store, or cannot put into an index if it is a key."""
    key_bytes = 0
    for column in staged.columns:
        if not column.type.has_any_length:
            continue
        values, is_key = batch.column(column.name), column in staged.keys
        if column.type.name != "bytea" and pc.any(nul := pc.match_substring(values, "\0")).as_py():
            where = _place(staged, batch, column.name, pc.index(nul, True).as_py())
            raise BadKey(f"State {staged.name}: a text in {where} holds a NUL character. Remove it.")
        longest = pc.max(sizes := pc.binary_length(values)).as_py() or 0
        limit, kind = (MAX_KEY_BYTES, BadKey) if is_key else (MAX_VALUE_BYTES, Overflow)
        if longest > limit:
            where = _place(staged, batch, column.name, pc.index(sizes, longest).as_py())
            raise kind(f"State {staged.name}: a value in {where} takes {longest} bytes, the limit is {limit}. Shorten it.")
        key_bytes += longest if is_key else 0
    if key_bytes and len(staged.keys) > 1:
        _check_key_bytes(staged, batch)


def _check_key_bytes(staged: Staged, batch: pa.RecordBatch) -> None:
    """Refuse a key whose columns together are too long for an index, however well it compresses."""
    sizes: Any = 0
    for key in staged.keys:
        values = batch.column(key.name)
        if pa.types.is_string(values.type) or pa.types.is_binary(values.type):
            sizes = pc.add(sizes, pc.fill_null(pc.binary_length(values), 0))
        else:
            sizes = pc.add(sizes, values.type.bit_width // 8 or 1)
    if (size := pc.max(sizes).as_py()) > MAX_KEYS_BYTES:
        longest = _key_of(staged, batch, pc.index(sizes, size).as_py())
        raise BadKey(
            f"State {staged.name}: the key {longest} takes {size} bytes in all, the limit is {MAX_KEYS_BYTES}. "
            "Shorten a column of it."
        )


def _check_years(staged: Staged, batch: pa.RecordBatch, name: str) -> None:
    """Refuse a date or time that Postgres may accept but other programs cannot read."""
    values = batch.column(name)
    if pa.types.is_date32(values.type):
        ticks, (first, last) = values.view(pa.int32()), DAYS
    elif pa.types.is_timestamp(values.type):
        ticks, (first, last) = values.view(pa.int64()), TICKS
        window = getattr(staged, "window", None)
        if window and name == WINDOW_START:  # of the windows that this stretch of time counts in, the first begins earlier
            first += window.size - window.every
    else:
        return
    bounds = pc.min_max(ticks).as_py()
    if bounds["min"] is None or (first <= bounds["min"] and bounds["max"] <= last):
        return
    number = pc.index(ticks, bounds["max"] if bounds["max"] > last else bounds["min"]).as_py()
    is_key = any(key.name == name for key in staged.keys)
    where = f"column {name}" if is_key else _place(staged, batch, name, number)
    raise (BadKey if is_key else Overflow)(
        f"State {staged.name}: {where} is {_shown(values[number])}. Years are kept from 1 to 9999. "
        "Leave such rows out in the transform, or give them another date there."
    )


def _place(staged: Staged, batch: pa.RecordBatch, column: str, number: int) -> str:
    """Return where a value is, in words."""
    return f"column {column}" + (f" of the key {_key_of(staged, batch, number)}" if staged.keys else "")


def _key_of(staged: Staged, batch: pa.RecordBatch, number: int) -> str:
    parts = (f"{key.name}={_shown(batch.column(key.name)[number])}" for key in staged.keys)
    return f"({', '.join(parts)})"


def _shown(value: pa.Scalar) -> str:
    """Return a value as text for a message; Python has no date after the year 9999."""
    if not value.is_valid:
        return "NULL"
    is_text = pa.types.is_string(value.type) or pa.types.is_binary(value.type)
    text = repr(value.as_py()) if is_text else value.cast(pa.string()).as_py()
    return text if len(text) <= SHOWN_KEY_CHARACTERS else f"{text[:SHOWN_KEY_CHARACTERS]}..."
