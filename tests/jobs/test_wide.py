"""Wide tables: each of their columns on its way through Spark into every kind of state."""

from typing import Any

import pyarrow as pa
import pytest

from tests.jobs.conftest import Tables
from tidegate.jobs import Files, Newest, Pipeline, Rows, State, Sum
from tidegate.jobs.states import AnyState

WIDTH = 100  # about as many columns as public tables of flights have
NAMES = [f"c{number}" for number in range(WIDTH)]
COLUMNS = dict.fromkeys(NAMES[2:], "bigint")
STATES: dict[str, AnyState] = {
    "wide_rows": Rows(dict.fromkeys(NAMES, "bigint")),
    "wide_sums": State({"c0": "bigint"}, {f"sum_{name}": Sum(name) for name in NAMES}),
    "wide_newest": Newest({"c0": "bigint"}, COLUMNS, {"c1": "bigint"}),
}


@pytest.mark.soak
def test_a_wide_table_becomes_wide_states(tables: Tables) -> None:
    """Two batches of one key: both rows, the sums, and the newer row."""
    pipeline: Pipeline = tables.declare(Files("inbox", schema=dict.fromkeys(NAMES, "bigint")), states=STATES)
    rows = [[1, moment, *range(moment, moment + WIDTH - 2)] for moment in (1, 2)]
    tables.put(
        *(pa.table({name: pa.array([value], pa.int64()) for name, value in zip(NAMES, row, strict=True)}) for row in rows)
    )
    tables.run(pipeline)

    def found(state: str) -> list[list[Any]]:
        return sorted([row[name] for name in row if name.startswith(("c", "sum_"))] for row in tables.rows(pipeline, state))

    assert found("wide_rows") == rows
    assert found("wide_newest") == rows[1:]
    assert found("wide_sums") == [[1, *(first + second for first, second in zip(*rows, strict=True))]]
