"""Shapes that several groups of routes answer with."""

from datetime import datetime

from pydantic import BaseModel

LARGEST = 10**15  # beyond any txid, and exact as a number of JavaScript
REASON_CHARACTERS = 2000
WITHOUT_NUL = r"^[^\x00]*$"  # which Postgres cannot compare with


class Column(BaseModel):
    """A column of a state: its name and Postgres type."""

    name: str
    type: str


class Action(BaseModel):
    """What an operator did by hand, and why."""

    acted_at: datetime
    action: str
    txid: int | None
    owner: str
    reason: str
