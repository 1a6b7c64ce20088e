"""Processes share a Spark server, whose caches of one process must not reach the next."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import steps
from tests.sources.conftest import Inbox
from tests.sources.second_process import PIPELINES, SCHEMA
from tidegate.jobs import Files
from tidegate.jobs.compute.sessions.session import PINNED, spark_session
from tidegate.jobs.sources.files.formats.parquet import ParquetReader
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import RowsLost

CLONE = Path(__file__).parents[2]


def write(folder: Path, rows: int) -> None:
    """Write the only file of a pipeline's folder, with this many rows: the amounts are 1, 2, 3 ..."""
    folder.mkdir(exist_ok=True)
    amounts = range(1, rows + 1)
    if folder.name == "csv":
        (folder / "1.csv").write_text("name,amount\n" + "".join(f"a,{amount}\n" for amount in amounts))
    else:
        pq.write_table(pa.table({"name": ["a"] * rows, "amount": pa.array(amounts, pa.int32())}), folder / "1.parquet")


def run_in_a_process(settings: Settings, run_id: str) -> None:
    command = [sys.executable, "-m", "tests.sources.second_process", run_id]
    done = subprocess.run(command, input=pickle.dumps(settings), cwd=CLONE, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.promise("performance:one-session-per-pipeline", "decision:0003")
def test_a_file_is_read_as_it_is_even_if_an_earlier_process_read_another_of_its_name(
    settings: Settings, register: Callable[..., None]
) -> None:
    register(*PIPELINES)
    for rows in (2, 1000):
        for pipeline in PIPELINES:
            write(settings.home / pipeline.name, rows)
        run_in_a_process(settings, f"{rows} rows")
    for pipeline in PIPELINES:
        (row,) = steps.rows(settings, pipeline)
        assert (row["lines"], row["amount"]) == (1002, 3 + 500500), pipeline.name


def test_rows_are_counted_by_footers_also_where_spark_read_too_few(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = inbox.declare(Files("inbox", schema=SCHEMA))
    pq.write_table(pa.table({"name": ["a", "b"], "amount": pa.array([1, 2], pa.int32())}), inbox.folder / "1.parquet")
    real = ParquetReader._read
    monkeypatch.setattr(ParquetReader, "_read", lambda *given, **options: real(*given, **options).where("name <> 'b'"))
    inbox.plan(pipeline, "test")
    with pytest.raises(RowsLost, match="2 rows"):
        steps.process(inbox.settings, pipeline, 1, owner="test")


@pytest.mark.promise("performance:one-session-per-pipeline", "decision:0003")
def test_spark_keeps_no_plans_and_so_no_listings(settings: Settings) -> None:
    """Spark's cache of plans would answer the next process with the files of the last one."""
    with spark_session(settings, "inbox") as session:
        assert session.conf.get("spark.connect.session.planCache.enabled") == "false"
    assert PINNED["spark.connect.session.planCache.enabled"] == "false"
