"""Places in stores: which can be declared, and what Spark and the ledger see of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.store import TakenFile
from tidegate.jobs import Files
from tidegate.jobs.sources.files.stores import ObjectInfo, buckets, object_listing, object_places
from tidegate.jobs.sources.files.stores.object_places import ObjectPath
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SourceChanged

COLUMNS = {"name": "string"}


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"folder": "s3a://lake/in/*.parquet"}, r"there is a \* in the place. Write a pattern as glob="),
        ({"folder": "hdfs://namenode:8020/in"}, "hdfs:// is not read. Copy the files into a bucket"),
        ({"folder": "s3a://key:secret@lake/in"}, "must not have a password in it"),
        ({"folder": "s3a://lake//in"}, "is written s3a://bucket/prefix"),
        ({"folder": "s3a://lake/in", "follow_links": True}, "has no links to follow"),
        ({"folder": "s3a://lake/in", "names_grow": True, "kind": "opaque"}, "cannot be opaque with names_grow"),
        ({"folder": "in", "manifests": "lists"}, "lists its folder whole: manifests is for a store"),
        ({"folder": "s3a://lake/in", "versions": True, "kind": "opaque"}, "cannot be opaque with versions"),
        ({"folder": "in", "versions": True}, "has no versions: they are kept by buckets"),
    ],
)
def test_what_a_store_cannot_do_is_refused_when_it_is_declared(declared: dict[str, Any], why: str) -> None:
    """With the reason, and what to write instead."""
    with pytest.raises(ValueError, match=why):
        Files(schema=COLUMNS, **declared)


def test_a_place_is_named_as_each_reader_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By OpenLineage's name for S3, by Hadoop's for Spark."""
    for name in (*buckets.ENDPOINTS, *buckets.REGIONS):
        monkeypatch.delenv(name, raising=False)
    source = Files("s3://lake/in/", schema=COLUMNS)
    (found,) = source.datasets({"files": [{"name": "dt=1/a b.parquet"}]}, Settings())
    place = object_places.place_of(Path("/home"), "s3://lake/in/")

    assert (found.namespace, found.name, list(found.locations)) == ("s3://lake", "in", ["s3://lake/in/dt=1/a b.parquet"])
    assert isinstance(place, ObjectPath)
    assert object_places.for_spark(place / "a.parquet") == "s3a://lake/in/a.parquet"
    assert object_places.for_spark(Path("/home/in")) == "file:/home/in"
    assert object_places.hadoop_options(place) == {}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert object_places.hadoop_options(place)["fs.s3a.endpoint"] == "http://minio:9000"
    assert object_places.place_of(Path("/home"), "in") == Path("/home/in")


class Ledger:
    """A history in which some objects have counted."""

    def __init__(self, *files: TakenFile) -> None:
        self._files = files

    def committed(self) -> int:
        """Return the last committed txid."""
        return 1

    def taken_files(self, names: Sequence[str], before_txid: int) -> Iterator[tuple[str, Sequence[TakenFile]]]:
        """Yield each name with its files."""
        for name in names:
            yield name, [file for file in self._files if file.name == name and file.txid < before_txid]

    def note_times(self, files: Sequence[TakenFile]) -> None:
        """Take note of nothing."""


def found(name: str, etag: str | None = "1") -> ObjectInfo:
    """Describe an object of one byte."""
    return ObjectInfo(f"in/{name}", 1, 0, etag, None)


def planned(monkeypatch: pytest.MonkeyPatch, pages: list[list[ObjectInfo]], ledger: Ledger, **source: Any) -> list[list[str]]:
    """Plan batches until there is nothing new; return their objects' names."""
    monkeypatch.setattr(object_listing, "listed", lambda _place, _after=None: iter(pages))
    coordinator = Files("s3a://lake/in", format="csv", schema=COLUMNS, **source).coordinator(Settings())
    coordinator.look_back(ledger)
    batches, previous = [], None
    while previous := coordinator.initialize_transaction(len(batches) + 2, previous, None):
        batches.append([file["name"] for file in previous["files"]])
    return batches


def test_batches_go_on_in_one_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the borders of pages; none is left out where a batch is full by its bytes."""
    pages = [[found("a"), found("b")], [found("c")], [], [found("d"), found(".hidden"), found("e/f")]]
    counted = TakenFile("b", found("b").identity or "", 1, 0, 1, is_committed=True, is_done=True)

    assert planned(monkeypatch, pages, Ledger(counted), max_files=2) == [["a", "c"], ["d"]]
    assert planned(monkeypatch, pages, Ledger(counted), max_files=9, max_bytes=1) == [["a"], ["c"], ["d"]]
    assert planned(monkeypatch, pages, Ledger(counted), max_files=9, glob="**/*") == [["a", "c", "d", "e/f"]]


def test_an_object_that_was_overwritten_after_it_counted_stops_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the listing comes to it; one that waits in another batch is that batch's."""
    other = TakenFile("b", found("b", "2").identity or "", 1, 0, 1, is_committed=True, is_done=True)
    waiting = TakenFile("b", found("b", "2").identity or "", 1, 0, 1, is_committed=False, is_done=False)

    with pytest.raises(SourceChanged, match="s3a://lake/in/b was overwritten since it counted in txid 1"):
        planned(monkeypatch, [[found("a"), found("b")]], Ledger(other), max_files=2)
    assert planned(monkeypatch, [[found("a"), found("b")]], Ledger(waiting), max_files=2) == [["a"]]
