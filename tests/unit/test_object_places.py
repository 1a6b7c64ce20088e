"""Places in stores: which can be declared, and what Spark and the ledger see of them."""

from pathlib import Path
from typing import Any

import pytest

from tidegate.jobs import Files
from tidegate.jobs.sources.files.stores import buckets, object_places
from tidegate.jobs.sources.files.stores.object_places import ObjectPath
from tidegate.state_store import Settings

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
        ({"folder": "in", "manifests": "lists"}, "is a folder on a disk: manifests is for a store"),
        ({"folder": "s3a://lake/in", "versions": True, "kind": "opaque"}, "cannot be opaque with versions"),
        ({"folder": "in", "versions": True}, "is a folder on a disk: versions is for a store"),
    ],
)
def test_what_a_store_cannot_do_is_refused_when_it_is_declared(declared: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Files(schema=COLUMNS, **declared)


def test_a_place_is_named_as_each_reader_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
