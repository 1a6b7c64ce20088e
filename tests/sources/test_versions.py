"""Objects of a bucket that keeps versions: a batch reads what it was planned with, whatever has become of it since."""

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sources.feeds import SCHEMA, ObjectsFeed
from tests.sources.in_process import ThisProcess, by_own_tasks
from tests.sources.s3 import Bucket, VersioningServer, running_server
from tests.sources.test_objects import bucket, project
from tests.store import Attempt
from tidegate.jobs import Files
from tidegate.jobs.sources.binding import coordinator_of, emitter_of
from tidegate.jobs.sources.files.formats.parquet import ParquetReader
from tidegate.jobs.testing import PROMISES, Bench
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import RowsLost, SourceChanged, SourceUnreadable

__all__ = ["bucket", "project"]  # fixtures

pytestmark = pytest.mark.soak

# What these promise to notice is read as it was; records are those of any file.
OTHERWISE = ("a_changed_row_is_noticed", "what_is_hidden_stops_the_replay", "records_are_the_rows")


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with running_server(VersioningServer) as server:
        yield server


def content(format: str, amount: int) -> bytes:
    if format == "csv":
        return f"name,amount\na,{amount}\n".encode()
    pq.write_table(pa.table({"name": ["a"], "amount": pa.array([amount], pa.int32())}), sink := io.BytesIO())
    return sink.getvalue()


def planned(source: Files, project: Settings) -> Any:
    return coordinator_of(source, project).initialize_transaction(1, None, None)


def read(emitter: Any, metadata: Any) -> list[tuple]:
    attempt = Attempt("inbox", 1, 1, metadata)
    if isinstance(emitter, ParquetReader):
        return sorted(tuple(row.values()) for row in by_own_tasks(emitter, attempt, metadata))
    return sorted(emitter.emit_batch(attempt, metadata).toLocalIterator())


@pytest.mark.parametrize("promise", [name for name in PROMISES["transactional"] if name not in OTHERWISE])
def test_objects_with_versions_keep_the_promises_of_files(project: Settings, bucket: Bucket, promise: str) -> None:
    PROMISES["transactional"][promise](Bench(ObjectsFeed(bucket, versions=True), ThisProcess(), project))  # type: ignore[arg-type]


@pytest.mark.promise("decision:0040")
@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_a_batch_reads_the_versions_that_it_was_planned_with(
    project: Settings, s3: VersioningServer, bucket: Bucket, format: Any
) -> None:
    for number in (1, 2):
        bucket.put(f"{number}.{format}", content(format, number))
    source = Files(bucket.url, format=format, schema=SCHEMA, versions=True, max_files=2)
    metadata = planned(source, project)
    emitter = emitter_of(source, ThisProcess(), project)  # type: ignore[arg-type]
    assert read(emitter, metadata) == [("a", 1), ("a", 2)]
    bucket.put(f"1.{format}", content(format, 1000))
    with pytest.raises(RowsLost, match=r"was overwritten while it was read\. The batch is read again, by the version"):
        emitter.verify_batch(Attempt("inbox", 1, 1, metadata), metadata)
    s3.delete(bucket.name, f"2.{format}")
    for _ in range(2):
        assert read(emitter, metadata) == [("a", 1), ("a", 2)]
        emitter.verify_batch(Attempt("inbox", 1, 2, metadata), metadata)
        bucket.put(f"1.{format}", content(format, 1))  # another version of the same content
    bucket.put(f"1.{format}", content(format, 1000))
    metadata["files"][0]["version"] = "lost"
    with pytest.raises(SourceChanged, match=rf"1.{format} is gone since its batch was planned and does not have the version"):
        read(emitter_of(source, ThisProcess(), project), metadata)  # type: ignore[arg-type]
    forgets = s3.make_bucket(f"forgets-{format}", keeps_versions=False)
    forgets.put(f"1.{format}", content(format, 1))
    with pytest.raises(SourceUnreadable, match=r"has no version: the bucket does not keep them\. Let its administrator turn"):
        planned(replace(source, folder=forgets.url), project)
