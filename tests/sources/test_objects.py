"""`Files` over a real S3 server, read in this process: the promises of a disk, by ETags and no more listings than needed."""

import json
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import obstore
import pyarrow as pa
import pytest
from obstore.store import S3Store
from pyiceberg.utils.config import Config

from tests import steps
from tests.jars import S3PROXY, fetch_or_skip
from tests.sources.conftest import Inbox
from tests.sources.feeds import FilesFeed
from tests.sources.in_process import SCHEMA, Follower, ThisProcess, batches, meanwhile, names, plan, raises, read
from tests.sources.lake_tables import DeltaLakeTable, load_catalog, rows_of
from tests.store import Attempt
from tidegate.jobs import Delta, Files, Iceberg
from tidegate.jobs.sources.binding import emitter_of
from tidegate.jobs.sources.files.completeness_markers import Markers
from tidegate.jobs.sources.files.stores import buckets, manifest_plan, object_places
from tidegate.jobs.testing import PROMISES, Bench
from tidegate.stack.components import java_libraries
from tidegate.stack.components.server_process import reserve_port, wait_until
from tidegate.stack.components.spark import java_program
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import RowsLost, SourceChanged, SourceUnavailable, SourceUnreadable

KEY, SECRET = "tidegate-tests", "not-a-secret-of-anyone"
SECONDS = 60


class S3Server:
    """One server. Its buckets are folders in `folder`; objects put there without it have no ETag."""

    packages: ClassVar = (S3PROXY,)

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder / "buckets"
        self.folder.mkdir()
        self.endpoint = f"http://127.0.0.1:{port}"
        self._log = folder / "log"
        self._properties = folder / "properties"
        self._properties.write_text(
            f"s3proxy.endpoint={self.endpoint}\ns3proxy.authorization=aws-v2-or-v4\ns3proxy.identity={KEY}\n"
            f"s3proxy.credential={SECRET}\njclouds.provider=filesystem-nio2\njclouds.identity=any\njclouds.credential=any\n"
            f"jclouds.filesystem.basedir={self.folder}\n"
        )
        self._logging = folder / "logback.xml"
        self._logging.write_text(
            '<configuration><appender name="out" class="ch.qos.logback.core.ConsoleAppender"><encoder><pattern>%d %level %msg'
            '%n</pattern></encoder></appender><root level="WARN"><appender-ref ref="out"/></root></configuration>'
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        options = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", f"{java_libraries.folder(self.packages)}/*"]
        command, environment = [java_program(), *options, *self._program()], {**os.environ, "LC_ALL": "C.UTF-8"}
        log = self._log.open("ab")
        with log, subprocess.Popen(command, stdout=log, stderr=log, env=environment) as self._process:
            try:
                assert wait_until(self._answers, SECONDS), self._log.read_text()[-2000:]
                yield
            finally:
                self._process.kill()

    def _program(self) -> list[str]:
        return [f"-Dlogback.configurationFile={self._logging}", "org.gaul.s3proxy.Main", "--properties", str(self._properties)]

    def make_bucket(self, name: str) -> "Bucket":
        (self.folder / name).mkdir()
        return Bucket(self, name)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            urllib.request.urlopen(self.endpoint)
        except URLError as error:
            return isinstance(error, HTTPError)  # it wants a signature
        return True


class VersioningServer(S3Server):
    """A server whose buckets keep versions, as S3Proxy's cannot: Adobe's S3Mock, which accepts any key."""

    packages: ClassVar = ("com.adobe.testing:s3mock:4.11.0",)

    def make_bucket(self, name: str, *, keeps_versions: bool = True) -> "Bucket":
        self.send("PUT", f"/{name}")
        if keeps_versions:
            status = "<Status>Enabled</Status>"
            self.send("PUT", f"/{name}?versioning", f"<VersioningConfiguration>{status}</VersioningConfiguration>")
        return Bucket(self, name)

    def send(self, method: str, path: str, content: str = "") -> None:
        urllib.request.urlopen(urllib.request.Request(self.endpoint + path, data=content.encode(), method=method))

    def _program(self) -> list[str]:
        port = urlsplit(self.endpoint).port
        settings = {"server.address": "127.0.0.1", "server.port": "0", "com.adobe.testing.s3mock.httpPort": port}
        options = [f"-D{name}={value}" for name, value in settings.items()]
        return [*options, f"-Dcom.adobe.testing.s3mock.store.root={self.folder}", "com.adobe.testing.s3mock.S3MockApplication"]


class Bucket:
    """A bucket, and what another program would do with it."""

    def __init__(self, server: S3Server, name: str) -> None:
        self.server = server
        self.name = name
        self.url = f"s3a://{name}"
        self.folder = server.folder / name
        key: Any = {"access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}
        patience: Any = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}
        self.store = S3Store(name, endpoint=server.endpoint, **key, **patience)

    def put(self, key: str, content: bytes | str) -> None:
        obstore.put(self.store, key, content.encode() if isinstance(content, str) else content)

    def csv(self, key: str, amount: int, name: str = "a") -> None:
        self.put(key, f"name,amount\n{name},{amount}\n")

    def get(self, key: str) -> bytes:
        return bytes(obstore.get(self.store, key).bytes())

    def delete(self, key: str) -> None:
        (self.folder / key).unlink()  # obstore deletes by a request that S3Proxy does not know


_numbers = count(1)


@pytest.fixture(scope="module")
def s3(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    kind: type[S3Server] = getattr(request, "param", S3Server)
    fetch_or_skip(*kind.packages)
    with ExitStack() as opened, tempfile.TemporaryDirectory(prefix="tidegate-s3-") as folder, patch.dict(os.environ):
        server = kind(Path(folder), reserve_port(None, opened))
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            del os.environ[name]
        os.environ |= {"AWS_ENDPOINT_URL": server.endpoint, "AWS_REGION": "us-east-1"}
        os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        object_places._store.cache_clear()
        opened.callback(object_places._store.cache_clear)
        opened.enter_context(server.running())
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> Bucket:
    return s3.make_bucket(f"bucket-{next(_numbers)}")


@pytest.fixture
def project(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, min_file_age_seconds=0)


def csv_in(place: str, glob: str = "*", **more: Any) -> Files:
    return Files(place, glob, "csv", SCHEMA, **{"max_files": 9, **more})


def planned(source: Files, settings: Settings, previous: Any = None) -> list[list[str]]:
    return [names(batch) for batch in batches(settings, source, previous)]


@pytest.mark.parametrize("source", [{}, {"kind": "opaque"}, {"names_grow": True}, {"manifests": "_lists"}], ids=str)
def test_objects_keep_the_promises_of_files(project: Settings, bucket: Bucket, source: dict[str, Any]) -> None:
    for name, holds in PROMISES[source.get("kind", "transactional")].items():
        if name != "records_are_the_rows":
            holds(Bench(FilesFeed(bucket, f"{name}/in/box", **source), ThisProcess(), project))


@pytest.mark.usefixtures("counted_here")
@pytest.mark.promise("decision:0034")
def test_an_object_that_is_not_as_planned_is_never_read(inbox: Inbox, bucket: Bucket) -> None:
    bucket.csv("one.csv", 1)
    pipeline = inbox.declare(csv_in(bucket.url), retry_delay_seconds=0)
    assert inbox.plan(pipeline, "run") == [1]
    bucket.csv("one.csv", 2)
    assert f"{bucket.url}/one.csv was overwritten since its batch was planned" in inbox.refused(pipeline, SourceChanged)
    bucket.delete("one.csv")
    assert f"{bucket.url}/one.csv is gone since its batch was planned" in inbox.refused(pipeline, SourceChanged)
    bucket.csv("one.csv", 1)
    # The server's times have whole seconds.
    os.utime(bucket.folder / "one.csv", (1_700_000_000, 1_700_000_000))
    metadata = steps.metadata(inbox.settings, 1)
    attempt, emitter = Attempt("inbox", 1, 1, metadata), emitter_of(pipeline.source, ThisProcess(), inbox.settings)
    assert list(emitter.emit_batch(attempt, metadata).toLocalIterator()) == [("a", 1)]
    bucket.csv("one.csv", 2)
    raises(SourceChanged, lambda: emitter.verify_batch(attempt, metadata), "was overwritten")
    bucket.csv("one.csv", 1)  # what Spark read may have been the other content
    raises(RowsLost, lambda: emitter.verify_batch(attempt, metadata), "was touched, or replaced and put back")
    bucket.csv("one.csv", 3)  # a task opens what was planned, or nothing
    opened = object_places.pinned(object_places.place_of(Path(), bucket.url) / "one.csv", metadata["files"][0])
    raises(SourceChanged, opened.open, "was overwritten")
    bucket.csv("one.csv", 1)
    inbox.run(pipeline, "run")
    assert inbox.counts(pipeline) == {"a": (1, 1)}
    bucket.csv("one.csv", 4)
    raises(SourceChanged, lambda: inbox.plan(pipeline, "later"), "has changed since it counted in txid 1")


def test_an_object_that_is_gone_for_a_moment_holds_up_later_names_that_grow(project: Settings, bucket: Bucket) -> None:
    """A program replaces it by deleting and writing: a plan that took the next one would never read it."""
    for number in range(1, 4):
        bucket.csv(f"in/{number}.csv", number)
    source = csv_in(f"{bucket.url}/in", "*.csv", names_grow=True, marker="done")
    bucket.put("in/done", "")
    describe, gone = buckets.Bucket.describe, ["in/2.csv"]

    def replaced(store: buckets.Bucket, key: str, version: str | None = None) -> Any:
        if key in gone:
            gone.remove(key)
            raise FileNotFoundError(key)
        return describe(store, key, version)

    with patch.object(buckets.Bucket, "describe", replaced):
        found = batches(project, source)
    assert [names(batch) for batch in found] == [["1.csv"], ["2.csv", "3.csv"]]
    bucket.csv("moved/0.csv", 0)
    bucket.put("moved/done", "")
    for last in (found[-1], plan(project, replace(source, names_grow=False))):
        third = plan(project, replace(source, folder=f"{bucket.url}/moved"), last)
        assert names(third) == ["0.csv"], "the last name of another place was no name of this one"


def test_objects_are_read_as_manifests_name_them(project: Settings, bucket: Bucket) -> None:
    source = csv_in(f"{bucket.url}/in", manifests=f"{bucket.url}/lists/in", max_files=2)
    for name in ("a/1.csv", "b 2.csv", "3.csv", "4.csv", "5.csv", "unnamed.csv"):
        bucket.csv(f"in/{name}", 1)
    bucket.put("lists/in/day=1/1", f"3.csv\r\n\n  b 2.csv\n3.csv\ns3://{bucket.name}/in/a/1.csv\n")
    entries = [{"url": f"{bucket.url}/in/4.csv", "mandatory": True}, {"url": "5.csv"}]
    bucket.put("lists/in/day=1/2.manifest", json.dumps({"entries": entries}))
    bucket.put("lists/in/day=1/3", "")
    assert planned(source, project) == [["3.csv", "b 2.csv"], ["a/1.csv", "4.csv"], ["5.csv"]]


NO_NAME, NO_MANIFEST = "is no name of an object below", "/_lists/1 is no manifest: "
OUTSIDE = ("../1", "/1", "a//1", "s3a://other/in/1", "{url}/inn/1", "hdfs://x/in/1")
ODD = ("\ud800", "a\x00b", "a\nb", "a\tb", "a" * 100_000)
NO_MANIFESTS = ('{"entries": [{"uri": "1"}]}', '{"entries": 1}', "{", '{"files": []}', '{"entries": [{"url": null}]}')
BAD_MANIFESTS: list[tuple[str, type[Exception], str]] = [
    ("2\nmissing\n", SourceUnavailable, r"Manifest .*/_lists/1 names missing, and there is no .*/in/missing\. "),
    *((f"1\n{name}\n", SourceUnreadable, f"/_lists/1, entry 2: .* {NO_NAME}") for name in OUTSIDE),
    *((json.dumps({"entries": [{"url": name}]}), SourceUnreadable, f"/_lists/1.* {NO_NAME}") for name in ODD),
    *((content, SourceUnreadable, NO_MANIFEST) for content in (*NO_MANIFESTS, '{"a":' * 100_000)),
]


@pytest.mark.promise("limit:MAX_MANIFEST_BYTES")
def test_a_manifest_that_cannot_be_followed_stops_planning(project: Settings, bucket: Bucket) -> None:
    source = csv_in(f"{bucket.url}/in", manifests="_lists", min_age_seconds=0, max_files=1)
    for name in ("1", "2", "3"):
        bucket.csv(f"in/{name}", 1)
    for content, error, message in BAD_MANIFESTS:
        bucket.put("in/_lists/1", content.replace("{url}", bucket.url))
        with pytest.raises(error, match=message):
            planned(source, project)
    bucket.put("in/_lists/1", "1\n2\n3\n")
    too_long = "/_lists/1 has 6 bytes, and a manifest at most 5"
    with patch.object(manifest_plan, "MAX_MANIFEST_BYTES", 5), pytest.raises(SourceUnreadable, match=too_long):
        planned(source, project)
    bucket.put("in/_lists/1", "1\n2\n")
    first = plan(project, source)
    assert planned(source, project, first) == [["2"]]
    assert planned(replace(source, min_age_seconds=3600), project) == []
    bucket.delete("in/_lists/1")
    with pytest.raises(SourceChanged, match=r"_lists/1 is gone, of which not all names have been read\. Put it back"):
        planned(source, project, first)


@pytest.mark.usefixtures("counted_here")
def test_an_object_that_manifests_name_again_is_read_once(inbox: Inbox, bucket: Bucket) -> None:
    """By several manifests, and by one that is written again, which is read from its beginning, also if it was read whole."""
    pipeline = inbox.declare(csv_in(f"{bucket.url}/in", manifests="_lists/", max_files=1))
    for name in ("1", "2", "3", "4", "5\u2028x"):
        bucket.csv(f"in/{name}", 1, name[0])
    for number, listed in enumerate(("1\n2\n", "2\n1\n", "1\n2\n")):
        bucket.put(f"in/_lists/{number}", listed)
    (txid,) = steps.plan(inbox.settings, pipeline, run_id="first", max_batches=1)
    steps.complete(inbox.settings, pipeline, txid)
    bucket.put("in/_lists/0", "3\n1\n2\n")
    bucket.put("in/_lists/2", "1\n2\n4\n")
    assert inbox.run(pipeline, "second") == [2, 3, 4]
    bucket.put("in/_lists/2", "1\n2\n4\n5\u2028x\n")
    assert inbox.run(pipeline, "third") == [5]
    bucket.delete("in/_lists/2")
    assert inbox.run(pipeline, "fourth") == []
    assert inbox.counts(pipeline) == dict.fromkeys("12345", (1, 1))


def test_a_manifest_that_is_written_again_while_it_is_read_is_not_read_in_part(project: Settings, bucket: Bucket) -> None:
    """Its first bytes may be those of the one before: what was added to it would be passed."""
    source = csv_in(f"{bucket.url}/in", manifests="_lists", max_files=1)
    bucket.csv("in/1", 1)
    bucket.csv("in/2", 1)
    bucket.put("in/_lists/1", "1\n")
    with meanwhile(buckets.Bucket, "read", lambda: bucket.put("in/_lists/1", "1\n2\n")):
        raises(SourceChanged, lambda: plan(project, source), "_lists/1")
    assert planned(source, project) == [["1"], ["2"]]


def test_an_empty_object_that_stands_for_a_folder_is_no_disorder(project: Settings, bucket: Bucket) -> None:
    bucket.csv("in/out.csv", 1)
    bucket.csv("in/out/b.csv", 2)
    stored = [meta for page in obstore.list(bucket.store, "in", chunk_size=10) for meta in page]
    placeholder = {**stored[0], "path": "in/out", "size": 0}
    with patch.object(obstore, "list", lambda *_arguments, **_options: [[stored[0], placeholder, stored[1]]]):
        assert planned(csv_in(f"{bucket.url}/in", "**/*.csv"), project) == [["out.csv", "out/b.csv"]]


def odd_days(*names: str) -> pa.Array:
    return pa.array([f"50% {name} =/ü" for name in names])


def test_a_delta_table_is_followed(project: Settings, bucket: Bucket) -> None:
    local, uploaded = DeltaLakeTable(project), set[Path]()
    source = Delta(f"{bucket.url}/table", schema={"name": "string"}, partitions={"day": "string"}, max_files=2)
    follower = Follower(project, source)

    def append(*names: str) -> None:
        local.append(*((name, 1) for name in names), more={"day": odd_days(*names)}, partition_by=["day"])
        for path in sorted(local.folder.rglob("*"), key=lambda path: "_delta_log" in path.parts):
            if path.is_file() and path not in uploaded:
                bucket.put(f"table/{path.relative_to(local.folder)}", path.read_bytes())
                uploaded.add(path)

    bucket.put("table/_delta_log/_staged", "")
    raises(SourceUnreadable, follower.run, r"is no Delta table: .* has no version")
    append("a", "b", "c")
    follower.run()
    append("d")
    local.delta.optimize.compact()
    local.delta.create_checkpoint()
    append("e")
    assert follower.run() == [(name, f"50% {name} =/ü") for name in "abcde"]


def test_an_iceberg_table_is_followed(project: Settings, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__S3__ENDPOINT", bucket.server.endpoint)
    for name in ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"):
        monkeypatch.setenv(name, "WHEN_REQUIRED")  # S3Proxy knows no others
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # as of its import
    lake = load_catalog("lake")
    lake.create_namespace_if_not_exists("stored")
    place = f"{bucket.url.replace('s3a:', 's3:')}/lake/odd"
    columns = rows_of().append_column("day", odd_days().cast(pa.string())).schema
    table = lake.create_table("stored.rows", columns, location=place)
    table.update_spec().add_identity("day").commit()
    follower = Follower(project, Iceberg("lake.stored.rows", schema={**SCHEMA, "day": "string"}, max_files=2))
    for some in ("abc", "d"):
        table.append(rows_of(*((name, 1) for name in some)).append_column("day", odd_days(*some)))
        follower.run()
    assert follower.run() == sorted(tuple(row.values()) for row in table.scan().to_arrow().to_pylist())
    assert len(follower.rows) == 4


def test_a_folder_that_is_written_again_while_it_is_planned_is_read_as_its_marker_found_it(
    project: Settings, bucket: Bucket
) -> None:
    first_day = "in/dt=2026-01-01"
    source = csv_in(f"{bucket.url}/in", "**/*.csv", marker="_SUCCESS")
    bucket.csv(f"{first_day}/lost.csv", 1000)  # of a job that failed
    bucket.csv(f"{first_day}/rewritten.csv", 100)
    bucket.put("in/dt=2026-01-02/_SUCCESS", "")
    bucket.csv("in/dt=2026-01-02/first.csv", 10)
    assert plan(project, replace(source, names_grow=True)) is None, "a later folder passed an earlier one"
    find = Markers._find

    def run_again() -> None:
        """As the job does after the plan has listed the folder, and before it looks for the marker."""
        bucket.delete(f"{first_day}/lost.csv")
        bucket.csv(f"{first_day}/rewritten.csv", 1)
        bucket.put(f"{first_day}/_SUCCESS", "")

    with meanwhile(Markers, "_find", run_again):
        found = plan(project, source)
    assert names(found) == ["dt=2026-01-01/rewritten.csv", "dt=2026-01-02/first.csv"]
    assert [file["size"] for file in found["files"]] == [len("name,amount\na,1\n"), len("name,amount\na,10\n")]

    def begins_again(markers: Markers, marked: str) -> Any:
        """The job takes its marker away and begins again after the plan has looked for it."""
        found = find(markers, marked)
        (bucket.folder / "in" / marked / "_SUCCESS").unlink(missing_ok=True)
        return found

    lost = r"dt=2026-01-01 lost its _SUCCESS, or got another one, while its files were"
    with patch.object(Markers, "_find", begins_again), pytest.raises(SourceUnavailable, match=lost):
        plan(project, source)


def test_a_store_that_refuses_is_no_store_that_is_away(project: Settings, bucket: Bucket) -> None:
    for name, value, error in (
        ("AWS_SECRET_ACCESS_KEY", "wrong-secret-0123", SourceUnreadable),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", SourceUnavailable),
    ):
        with patch.dict(os.environ, {name: value}):
            object_places._store.cache_clear()
            assert "wrong-secret-0123" not in raises(error, lambda: plan(project, csv_in(bucket.url)), "the store ")
    object_places._store.cache_clear()


@pytest.mark.soak
@pytest.mark.promise("decision:0040")
@pytest.mark.parametrize("s3", [VersioningServer], indirect=True)
def test_a_batch_reads_the_versions_that_it_was_planned_with(project: Settings, s3: VersioningServer) -> None:
    bucket = s3.make_bucket("keeps")
    for number in (1, 2):
        bucket.csv(f"{number}.csv", number)
    source = csv_in(bucket.url, versions=True)
    metadata, emitter = plan(project, source), emitter_of(source, ThisProcess(), project)
    attempt = Attempt("inbox", 1, 1, metadata)
    assert sorted(emitter.emit_batch(attempt, metadata).toLocalIterator()) == [("a", 1), ("a", 2)]
    bucket.csv("1.csv", 1000)
    with pytest.raises(RowsLost, match=r"was overwritten while it was read\. The batch is read again, by the version"):
        emitter.verify_batch(attempt, metadata)
    s3.send("DELETE", "/keeps/2.csv")
    for _ in range(2):
        assert sorted(emitter.emit_batch(attempt, metadata).toLocalIterator()) == [("a", 1), ("a", 2)]
        emitter.verify_batch(attempt, metadata)
        bucket.csv("1.csv", 1)  # another version of the same content
    bucket.csv("1.csv", 1000)
    metadata["files"][0]["version"] = "lost"
    with pytest.raises(SourceChanged, match=r"1.csv is gone since its batch was planned and does not have the version"):
        read(project, source, metadata)
    forgets = s3.make_bucket("forgets", keeps_versions=False)
    forgets.csv("1.csv", 1)
    with pytest.raises(SourceUnreadable, match=r"has no version: the bucket does not keep them\. Let its administrator turn"):
        plan(project, replace(source, folder=forgets.url))
