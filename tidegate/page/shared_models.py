"""Shapes that several groups of routes answer with."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from fastapi import Query
from pydantic import BaseModel

from tidegate.state_store.declarations.column_spec import DerivedColumn, KeyColumn, ValueColumn

LARGEST = 10**15  # beyond any txid, and exact as a number of JavaScript
REASON_CHARACTERS = 2000
Txid = Annotated[int | None, Query(ge=1, le=LARGEST)]
WITHOUT_NUL = r"^[^\x00]*$"  # which Postgres cannot compare with


class Column(BaseModel):
    """A column of a state: its name and Postgres type."""

    name: str
    type: str


def columns_of(shown: Sequence[KeyColumn | ValueColumn | DerivedColumn]) -> list[Column]:
    """Return some columns of a state for an answer."""
    return [Column(name=column.name, type=column.type.name) for column in shown]


class Action(BaseModel):
    """What an operator did by hand, and why."""

    acted_at: datetime
    action: str
    txid: int | None
    owner: str
    reason: str
