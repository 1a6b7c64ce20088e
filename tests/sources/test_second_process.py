"""Processes share a Spark server, whose caches of one process must not reach the next.

In each process, which is this module as a program, the same steps send the same requests to Spark's server, as in Airflow.
"""

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import steps
from tests.checkout import REPOSITORY
from tests.sources.conftest import PER_NAME
from tests.sources.in_process import SCHEMA
from tidegate.jobs import Files, Pipeline
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings

SOURCE = Files("inbox", schema=SCHEMA, kind="opaque", done_folder="done")
PIPELINE = Pipeline("inbox", SOURCE, {"sums": replace(PER_NAME, kind="opaque")}, lambda rows: rows.where("amount > 0"))


@pytest.mark.promise("performance:one-session-per-pipeline", "decision:0003")
def test_a_file_is_read_as_it_is_even_if_an_earlier_process_read_another_of_its_name(
    settings: Settings, register: Callable[..., None]
) -> None:
    register(PIPELINE)
    (settings.home / "inbox").mkdir()
    for rows in (2, 1000):
        table = pa.table({"name": ["a"] * rows, "amount": pa.array(range(1, rows + 1), pa.int32())})
        pq.write_table(table, settings.home / "inbox" / "1.parquet")
        command = [sys.executable, "-m", "tests.sources.test_second_process", f"{rows} rows"]
        subprocess.run(command, input=pickle.dumps(settings), cwd=REPOSITORY, check=True, timeout=300)
    (row,) = steps.rows(settings, PIPELINE)
    assert (row["lines"], row["amount"]) == (1002, 3 + 500500)


if __name__ == "__main__":
    run_pipeline(pickle.load(sys.stdin.buffer), PIPELINE, run_id=sys.argv[1])
