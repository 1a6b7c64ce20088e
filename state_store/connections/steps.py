"""Steps: functions of a connection become methods of a `Database`, each of which runs one of them in a transaction of its own.

A method has the function's parameters but for the connection, and its docstring. `doing` is how errors call the
step: each ``{}`` in it stands for the next argument, or its name.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from tidegate.state_store.connections.database import Database

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Begin = Callable[[Any, str], AbstractContextManager[Connection]]


def reads(doing: str, function: Callable[Concatenate[Connection, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Return a method that reads."""
    return _in_transaction(Database._transaction, doing, function)


def reads_snapshot(doing: str, function: Callable[Concatenate[Connection, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Return a method whose statements all see one snapshot."""
    return _in_transaction(Database._snapshot, doing, function)


def writes(
    doing: str, function: Callable[Concatenate[Connection, _P], _R], *, lock_timeout_seconds: int | None = None
) -> Callable[Concatenate[Any, _P], _R]:
    """Return a method that changes something, with bounded waits and a durable COMMIT."""
    begin = partial(Database._write_transaction, lock_timeout_seconds=lock_timeout_seconds)
    return _in_transaction(begin, doing, function)


def writes_later(doing: str, function: Callable[Concatenate[Connection, _P], None]) -> Callable[Concatenate[Any, _P], None]:
    """Return a method for what can be done later: if another session has locked a row, it is left, which is logged."""
    return _in_transaction(Database._transaction_for_later, doing, function)


def reads_rows(
    doing: str, function: Callable[Concatenate[Connection, _P], Iterator[_R]]
) -> Callable[Concatenate[Any, _P], Iterator[_R]]:
    """Return a method that yields rows from one transaction, which ends when there are no more, or none is wanted."""

    @wraps(function)
    def step(self: Database, /, *arguments: _P.args, **named: _P.kwargs) -> Iterator[_R]:
        with self._transaction(_said(doing, arguments)) as connection:
            yield from function(connection, *arguments, **named)

    return step


def _in_transaction(
    begin: _Begin, doing: str, function: Callable[Concatenate[Connection, _P], _R]
) -> Callable[Concatenate[Any, _P], _R]:
    @wraps(function)
    def step(self: Database, /, *arguments: _P.args, **named: _P.kwargs) -> _R:
        with begin(self, _said(doing, arguments)) as connection:
            return function(connection, *arguments, **named)

    return step


def _said(doing: str, arguments: tuple[Any, ...]) -> str:
    return doing.format(*(getattr(given, "name", given) for given in arguments))
