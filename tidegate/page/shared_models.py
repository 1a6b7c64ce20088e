"""Shapes that several groups of routes answer with."""

from datetime import datetime

from pydantic import BaseModel

from tidegate.explain.batch_causes import Severity
from tidegate.explain.remedies import Verb

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


class Button(BaseModel):
    """The action of the page that helps."""

    verb: Verb
    txid: int | None


class Cause(BaseModel):
    """Why something waits, in one sentence, with what to do."""

    code: str
    sentence: str
    txid: int | None = None
    since: datetime | None = None
    advice: str | None = None
    command: str | None = None
    action: Button | None = None
    severity: Severity
    error: str | None = None


class Why(BaseModel):
    """A chain of causes: the first is the nearest, the last the root cause."""

    causes: list[Cause]
