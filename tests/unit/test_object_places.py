"""Places in stores: which can be declared, and what Spark and the ledger see of them."""

import io
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.store import TakenFile
from tidegate.jobs import Files, Reference
from tidegate.jobs.sources.files.stores import ObjectInfo, buckets, object_listing, object_places
from tidegate.jobs.sources.files.stores.object_places import ObjectPath
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import ExecutorsUnprepared, SourceChanged, SourceUnreadable

COLUMNS = {"name": "string"}
PLACE = ObjectPath("s3a://lake", "in")


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"folder": "s3a://lake/in/*.parquet"}, r"there is a \* in the place. Write a pattern as glob="),
        ({"folder": "ftp://server/in"}, "ftp:// is not read: use one of s3a://"),
        ({"folder": "hdfs://namenode:8020/in"}, "hdfs:// is not read. Copy the files into a bucket"),
        ({"folder": "hdfs://lake/in", "versions": True}, "hdfs:// is not read. Copy the files into a bucket"),
        ({"folder": "s3a://lake/in", "manifests": "hdfs://lake/lists"}, "hdfs:// is not read. Copy the files into a bucket"),
        ({"folder": "s3a://key:secret@lake/in"}, "must not have a password in it"),
        ({"folder": "s3a://"}, "is written s3a://bucket/prefix"),
        ({"folder": "s3a://lake//in"}, "is written s3a://bucket/prefix"),
        ({"folder": "s3a://lake/in", "done_folder": "done"}, "cannot move objects to a done folder"),
        ({"folder": "s3a://lake/in", "follow_links": True}, "has no links to follow"),
        ({"folder": "s3a://lake/in", "names_grow": True, "kind": "opaque"}, "cannot be opaque with names_grow"),
        ({"folder": "in", "names_grow": True}, "lists its folder whole"),
        ({"folder": "in", "manifests": "lists"}, "lists its folder whole: manifests is for a store"),
        ({"folder": "s3a://lake/in", "manifests": "lists", "glob": "*.csv"}, "cannot have a glob: its manifests name"),
        ({"folder": "s3a://lake/in", "manifests": "lists", "names_grow": True}, "cannot have names_grow: its manifests name"),
        ({"folder": "s3a://lake/in", "manifests": "lists", "marker": "done"}, "cannot have a marker: its manifests name"),
        ({"folder": "s3a://lake/in", "manifests": "lists", "kind": "opaque"}, "cannot be opaque with manifests"),
        ({"folder": "s3a://lake/in", "manifests": "ftp://lists"}, "ftp:// is not read"),
        ({"folder": "s3a://lake/in", "versions": True, "kind": "opaque"}, "cannot be opaque with versions"),
        ({"folder": "in", "versions": True}, "has no versions: they are kept by buckets"),
    ],
)
def test_what_a_store_cannot_do_is_refused_when_it_is_declared(declared: dict[str, Any], why: str) -> None:
    """With the reason, and what to write instead."""
    with pytest.raises(ValueError, match=why):
        Files(schema=COLUMNS, **declared)


def test_a_reference_in_a_store_is_kept_by_versions_and_read_whole() -> None:
    """It is not copied to a disk, and has no last name."""
    with pytest.raises(ValueError, match=r"that is for folders on a disk\. Declare versions=True in its Files, if the bucket"):
        Reference(Files("s3a://lake/in", schema=COLUMNS), keep_folder="kept")
    with pytest.raises(ValueError, match="is read whole by each batch: leave names_grow out"):
        Reference(Files("s3a://lake/in", schema=COLUMNS, names_grow=True))
    Reference(Files("s3a://lake/in", schema=COLUMNS, versions=True))


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


def test_declaring_a_place_loads_no_client() -> None:
    """Airflow parses Dag files often."""
    declares = "from tidegate.jobs import Files; Files('s3a://lake/in', schema={'a': 'int'})"
    code = f"import sys; {declares}; print('obstore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


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


@pytest.mark.parametrize(("name", "why"), [("a.csv.zst", "compressed in a way"), ("a" * 1025, "more than 1024 bytes")])
def test_an_object_that_could_not_be_read_is_refused_when_it_is_planned(
    monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    """Before it has a txid."""
    with pytest.raises(SourceUnreadable, match=why):
        planned(monkeypatch, [[found(name)]], Ledger())


def test_executors_without_the_library_of_a_store_are_named() -> None:
    """Where only a file of a batch shows that it is needed, as for Parquet that Spark would misread."""
    emitter = Files("s3a://lake/in", schema=COLUMNS).emitter(None, Settings())  # type: ignore[arg-type] - it asks Spark nothing
    found = emitter.explain(Exception("PythonException: ...\nModuleNotFoundError: No module named 'obstore'\n"))
    assert isinstance(found, ExecutorsUnprepared)
    assert "python -m pip install 'obstore==" in str(found)


def test_an_objects_bytes_are_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from any place, to the end and no further, in as many requests as there are blocks."""
    content, ranges = bytes(range(256)) * 40, []

    class Got:
        def __init__(self, start: int, end: int) -> None:
            self._bytes = content[start:end]

        def bytes(self) -> bytes:
            return self._bytes

    def get(_store: Any, key: str, *, options: Any) -> Got:
        assert (key, options["if_match"]) == ("in/a", '"1"')
        ranges.append(options["range"])
        return Got(*options["range"])

    monkeypatch.setattr("obstore.get", get)
    monkeypatch.setattr(buckets, "_client", lambda _url: None)
    monkeypatch.setattr(object_places, "_store", buckets.Bucket)
    monkeypatch.setattr(object_places, "describe", lambda path: ObjectInfo(path.key, len(content), 0, "1", None))
    with ObjectPath("s3a://lake", "in/a", "1").open() as file:
        assert file.read() == content
        assert file.seek(-10, io.SEEK_END) == len(content) - 10
        assert file.read(100) == content[-10:]
        assert file.read(1) == b""
    assert len(ranges) <= 3
    with pytest.raises(SourceChanged, match="was overwritten since its batch was planned"):
        ObjectPath("s3a://lake", "in/a", "2").open()
