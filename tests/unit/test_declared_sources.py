"""Declarations of sources that could not keep their promise are refused, and none shows a password."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from tidegate.jobs import Kafka, PostgresTable


def table(**changes: Any) -> PostgresTable:
    schema = {"id": "bigint", "name": "string", "at": "timestamp"}
    return PostgresTable(**{"table": "orders", "key": "id", "schema": schema, **changes})


@pytest.mark.parametrize(
    ("declare", "problem"),
    [
        (lambda: Kafka("orders", start=datetime(2026, 11, 1)), "Add tzinfo"),
        (lambda: Kafka("orders", when_expired="continue"), "a transactional source leaves none out"),
        (lambda: table(key=("id", "name")), "a key of two columns is a timestamp"),
        (lambda: table(key=("at", "id"), key_is_drawn=True), "key_is_drawn is not for a key that begins with a time"),
        (lambda: table(schema={"id": "double"}), "id is double, which puts nothing in order"),
        (lambda: table(schema={"id": "date"}), "depends on the writer's time zone"),
        (lambda: table(connection="host=a dbname=b user=c password=hidden"), "connection holds a password"),
        (lambda: table(connection={"hots": "hidden"}), "neither a libpq connection string"),
    ],
)
def test_what_cannot_keep_the_promise_is_refused(declare: Callable[[], object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as refusal:
        declare()
    assert "hidden" not in str(refusal.value)
