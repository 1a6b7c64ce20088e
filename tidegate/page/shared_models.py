"""Shapes that several groups of routes answer with."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import BaseModel

from tidegate.state_store.declarations.column_spec import DerivedColumn, KeyColumn, ValueColumn

LARGEST = 10**15  # beyond any txid, and exact as a number of JavaScript
REASON_CHARACTERS = 2000
Txid = Annotated[int | None, Query(ge=1, le=LARGEST)]
Number = Annotated[int, Path(ge=1, le=LARGEST)]  # in an address; Postgres would fail on a larger one
_AS_THEY_ARE = ("integer", "smallint", "boolean")
WITHOUT_NUL = r"^[^\x00]*$"  # which Postgres cannot compare with


class Column(BaseModel):
    """A column of a state: its name and Postgres type."""

    name: str
    type: str


def columns_of(shown: Sequence[KeyColumn | ValueColumn | DerivedColumn]) -> list[Column]:
    """Return some columns of a state for an answer."""
    return [Column(name=column.name, type=column.type.name) for column in shown]


def as_json(value: Any, kind: str) -> Any:
    """Return a value of Postgres, of the type `kind`, for an answer; as text if no JavaScript number holds all such values."""
    if isinstance(value, list):
        return [as_json(each, kind.removesuffix("[]")) for each in value]
    if value is None or kind in _AS_THEY_ARE:
        return value
    if isinstance(value, bytes | memoryview):
        return f"\\x{bytes(value).hex()}"
    if isinstance(value, dict):
        return json.dumps(value)
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


class Action(BaseModel):
    """What an operator did by hand, and why."""

    acted_at: datetime
    action: str
    txid: int | None
    owner: str
    reason: str
