"""Pipelines over Parquet files that tests write as Arrow tables, one batch each."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sources.conftest import Inbox
from tidegate.jobs import Files, Pipeline, State
from tidegate.state_store import Settings

# Spark's name of each Arrow type that tests use.
SPARK_TYPES = {
    "string": "string",
    "int32": "int",
    "int64": "bigint",
    "double": "double",
    "bool": "boolean",
    "date32[day]": "date",
    "timestamp[us, tz=UTC]": "timestamp",
}


class Tables(Inbox):
    """An inbox that takes Arrow tables: each becomes one file, each file one batch."""

    def put(self, *tables: pa.Table) -> None:
        """Write more tables after the existing ones."""
        existing = len(list(self.folder.iterdir()))
        for number, table in enumerate(tables, start=existing + 1):
            content = io.BytesIO()
            pq.write_table(table, content)
            self.write(f"{number:04d}.parquet", content.getvalue())

    def aggregate(self, state: State, *tables: pa.Table, transform: Any = None) -> list[Mapping[str, Any]]:
        """Run the tables through a pipeline with this one state; return its rows."""
        pipeline = self.declare_over(tables[0].schema, state, transform)
        self.put(*tables)
        assert self.run(pipeline) == list(range(1, len(tables) + 1))
        return self.rows(pipeline)

    def declare_over(self, schema: pa.Schema, state: State, transform: Any = None) -> Pipeline:
        """Declare and register a pipeline over tables of this schema."""
        columns = {
            column.name: SPARK_TYPES.get(str(column.type)) or f"{column.type}".replace("decimal128", "decimal")
            for column in schema
        }
        return self.declare(Files("inbox", schema=columns), states={"per_name": state}, transform=transform)


@pytest.fixture
def tables(settings: Settings, register: Callable[..., None]) -> Tables:
    """An empty inbox for tables."""
    return Tables(settings, register)
