"""`Files` over a real HDFS: the same promises as on a disk, by its checksums."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests import steps
from tests.acceptance.test_every_source import die_everywhere, pipeline_over
from tests.conftest import Server
from tests.sources.beside_store import check_delta, check_markers, server, spark, template
from tests.sources.feeds import SCHEMA
from tests.sources.hdfs import DATANODE, NAMENODE, HdfsCluster, HdfsFolder, stack_beside_hdfs
from tests.sources.test_objects import CASES, STATE, VARIANTS, ObjectsFeed, check_reference, parquet, stored
from tidegate.jobs import Files, Pipeline, State
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.jobs.sources.files.stores import hdfs, object_listing, object_places
from tidegate.jobs.testing import Bench
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SourceChanged, SourceUnavailable, SourceUnreadable

__all__ = ["server", "spark", "template"]  # fixtures

_numbers = count(1)
ODD = (
    *("with space.parquet", "50%25 off%2F.parquet", "grüße 😀.parquet", "a=b.parquet", "[x]{y}.parquet", "plus+&'!#;?.parquet"),
    *("back\\slash.parquet", "two\nlines.parquet"),
)
# By their names with a slash after a folder's, as bytes; HDFS lists them in another order.
IN_ORDER = ("a#1", "a.csv", "a/z.csv", "ab", "b/ä/1", "b/😀", "z", "ä", "ö!", "ö/1", "😀")


@pytest.fixture(scope="module")
def beside_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Settings, HdfsCluster]]:
    """A cluster, and a stack whose Spark reads from it."""
    with stack_beside_hdfs(tmp_path_factory.mktemp("hdfs_stack")) as both:
        yield both


@pytest.fixture(scope="module")
def cluster(beside_store: tuple[Settings, HdfsCluster]) -> HdfsCluster:
    """The cluster."""
    return beside_store[1]


@pytest.fixture
def folder(cluster: HdfsCluster) -> HdfsFolder:
    """A folder of the test's own."""
    return cluster.make_folder(f"folder-{next(_numbers)}")


def inbox(folder: HdfsFolder, format: str = "csv", **source: Any) -> Pipeline:
    """Return a pipeline over the folder."""
    files = Files(folder.url, format=format, schema=SCHEMA, **source)
    return Pipeline("inbox", files, {"per_name": STATE}, retry_delay_seconds=0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("variant", "promise"), CASES, ids=[f"{name}-{promise[0]}" for name, promise in CASES])
def test_files_in_hdfs_keep_the_promises_of_files(
    settings: Settings, spark: SparkSession, folder: HdfsFolder, variant: str, promise: tuple
) -> None:
    """Each promise of each kind."""
    promise[1](Bench(ObjectsFeed(folder, **VARIANTS[variant]), spark, settings))


@pytest.mark.soak
def test_a_crash_anywhere_leaves_the_state_of_a_clean_run(
    settings: Settings, server: Server, register: Callable[..., None], folder: HdfsFolder
) -> None:
    """Runs die before statements and around COMMITs of plan, process and commit; the next run repairs it."""
    feed = ObjectsFeed(folder)
    pipeline = pipeline_over(feed)
    register(pipeline)
    die_everywhere(settings, server, pipeline, feed, first_point=7)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [pa.int32(), pa.uint16()], ids=["Spark's reader", "own tasks"])
def test_the_state_is_what_duckdb_makes_of_the_same_files(
    settings: Settings, register: Callable[..., None], folder: HdfsFolder, tmp_path: Path, kind: pa.DataType
) -> None:
    """Partition folders, files of several blocks, and names that paths and URLs would have to quote."""

    def put(name: str, content: bytes) -> None:
        folder.put(f"deep er/{name}", content)
        path = tmp_path / name.partition("/")[0] / f"{next(_numbers)}.parquet"  # DuckDB does not read all of these names
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content)

    for number, name in enumerate(ODD):
        for day in ("2026-01-01", "2026-01-02"):
            put(
                f"dt={day}/{name}",
                parquet([f"n{n % 3}" for n in range(number, number + 5)], list(range(number, number + 5)), kind),
            )
    many = [f"{n:032x}" for n in range(100_000)]
    put("dt=2026-01-03/large.parquet", parquet(many, [n % 1000 for n in range(100_000)], kind))
    folder.put("deep er/dt=2026-01-01/_SUCCESS", b"")
    folder.put("deep er/dt=2026-01-01/next.parquet._COPYING_", b"half")
    folder.put("deeper/dt=2026-01-01/other.parquet", parquet(["beside"], [1], kind))
    source = Files(f"{folder.url}/deep er", "**/*.parquet", schema=SCHEMA, partitions={"dt": "date"}, max_files=4)
    pipeline = Pipeline("lake", source, {"per_day": State(key={"dt": "date", "name": "text"}, aggregates=STATE.aggregates)})
    register(pipeline)
    assert len(run_pipeline(settings, pipeline, run_id="run").commits) == 5  # 17 files
    assert run_pipeline(settings, pipeline, run_id="again").commits == []

    query = f"""
        SELECT dt, name, count(*), sum(amount)::bigint
        FROM read_parquet('{tmp_path}/*/*.parquet', hive_partitioning = true) GROUP BY ALL ORDER BY ALL
    """
    assert stored(settings, pipeline) == duckdb.execute(query).fetchall()
    left = source.left_alone(settings)
    assert (left.read, left.count) == (17, 2)


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_a_file_that_is_not_as_planned_is_never_read(
    settings: Settings, register: Callable[..., None], folder: HdfsFolder, format: str
) -> None:
    """Overwritten with as many bytes, deleted, or replaced by a folder; the planned content put back is read."""

    def put(amount: int) -> None:
        folder.put(f"one.{format}", parquet(["a"], [amount]) if format == "parquet" else f"name,amount\na,{amount}\n")

    put(1)
    pipeline = inbox(folder, format)
    register(pipeline)
    assert steps.plan(settings, pipeline, run_id="run") == [1]
    for spoil, message in (
        (lambda: put(2), "was overwritten"),
        (lambda: folder.delete(f"one.{format}"), "is gone"),
        (lambda: folder.put(f"one.{format}/inside", "name,amount\n"), "is gone"),
    ):
        spoil()
        with pytest.raises(SourceChanged, match=rf"{folder.url}/one.{format} {message} since its batch was planned"):
            steps.process(settings, pipeline, 1, owner="test")
    folder.delete(f"one.{format}")
    put(1)
    run_pipeline(settings, pipeline, run_id="run")
    assert stored(settings, pipeline) == [("a", 1, 1)]
    folder.rename(f"one.{format}", "moved")
    folder.rename("moved", f"one.{format}")
    folder.set_time(f"one.{format}", 1_700_000_000_000)
    assert steps.plan(settings, pipeline, run_id="same") == []
    put(4)
    with pytest.raises(SourceChanged, match="was overwritten since it counted in txid 1"):
        steps.plan(settings, pipeline, run_id="later")


def test_a_file_that_is_written_waits_until_it_is_closed(
    settings: Settings, register: Callable[..., None], folder: HdfsFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """However old it is; with names that grow, those after it wait too. One that grows after it counted is refused."""
    pipeline = inbox(folder, max_files=9)
    growing = inbox(folder, names_grow=True)
    register(pipeline)
    folder.put("1.csv", "name,amount\na,1\n")
    folder.put("1.csv._COPYING_", "name,amount\na,1\n")  # hdfs dfs -put has written it, and renames it next
    folder.put("3.csv", "name,amount\na,100\n")
    with folder.being_written("2.csv", "name,amount\na,10\n"):
        run_pipeline(settings, pipeline, run_id="one")
        assert stored(settings, pipeline) == [("a", 2, 101)]
        assert f"{folder.url}/2.csv is open for writing: not planned yet" in caplog.text
        coordinator = growing.source.coordinator(settings)
        (first,) = coordinator.initialize_transaction(1, None, None)["files"]
        assert first["name"] == "1.csv"
        assert coordinator.initialize_transaction(2, {"files": [first]}, None) is None
    run_pipeline(settings, pipeline, run_id="two")
    assert stored(settings, pipeline) == [("a", 3, 111)]
    folder.append("2.csv", "a,1000\n")
    with pytest.raises(SourceChanged, match=r"2.csv was overwritten since it counted in txid 2"):
        steps.plan(settings, pipeline, run_id="three")


def test_a_file_that_a_manifest_names_is_not_read_while_it_is_written(settings: Settings, folder: HdfsFolder) -> None:
    """Its content would count as it is now, and the rest of it never."""
    source = replace(inbox(folder).source, glob="*", manifests="_lists")
    folder.put("1.csv", "name,amount\na,1\n")
    folder.put("_lists/1", f"1.csv\n{folder.url}/2.csv\n")
    with folder.being_written("2.csv", "name,amount\na,10\n"), pytest.raises(SourceUnavailable, match=r"2\.csv is open"):
        source.coordinator(settings).initialize_transaction(1, None, None)
    coordinator = source.coordinator(settings)
    first = coordinator.initialize_transaction(1, None, None)
    second = coordinator.initialize_transaction(2, first, None)
    assert [batch["files"][0]["name"] for batch in (first, second)] == ["1.csv", "2.csv"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_a_batch_is_joined_with_the_files_that_were_there_when_it_was_planned(
    settings: Settings, register: Callable[..., None], folder: HdfsFolder, format: str
) -> None:
    """Known by the checksums of HDFS."""
    check_reference(settings, register, folder, format)


@pytest.mark.soak
def test_a_delta_table_is_followed(settings: Settings, register: Callable[..., None], folder: HdfsFolder) -> None:
    """Its log and its data files are reached as all files are."""
    check_delta(settings, register, folder)


def test_folders_are_read_once_they_are_marked(settings: Settings, register: Callable[..., None], folder: HdfsFolder) -> None:
    """As the files are then, also if they were listed before."""
    check_markers(settings, register, folder)


def test_files_are_listed_in_the_order_of_their_names(folder: HdfsFolder) -> None:
    """Not in that of HDFS, which compares signed bytes and counts no slash; from any name on."""
    for name in reversed(IN_ORDER):
        folder.put(name, "")
    place = object_places.place_of(Path(), folder.url)
    assert isinstance(place, object_places.ObjectPath)

    def names(after: str | None = None) -> list[str]:
        return [found.key.partition("/")[2] for page in object_places.listed(place, after) for found in page]

    assert sorted(IN_ORDER, key=str.encode) == list(IN_ORDER) == names()
    for number, name in enumerate(IN_ORDER):
        assert names(name) == list(IN_ORDER[number + 1 :])
    assert names("b/") == list(IN_ORDER[4:])


def test_a_folder_of_many_files_is_read_page_by_page(folder: HdfsFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """More files than the cluster lists at once; with names that grow, folders that are passed are not asked for."""
    for number in range(25):
        folder.put(f"dt=1/{number:04d}.csv", "")
    folder.put("dt=2/0.csv", "")
    place = object_places.place_of(Path(), folder.url)
    assert isinstance(place, object_places.ObjectPath)
    asked: list[str] = []
    get = hdfs.Hdfs._get
    monkeypatch.setattr(
        hdfs.Hdfs, "_get", lambda self, operation, key, **rest: asked.append(key) or get(self, operation, key, **rest)
    )

    pages = list(object_places.listed(place))
    assert [found.key for page in pages for found in page][23:] == [
        f"{folder.name}/{name}" for name in ("dt=1/0023.csv", "dt=1/0024.csv", "dt=2/0.csv")
    ]
    assert asked == [folder.name, *[f"{folder.name}/dt=1"] * 3, f"{folder.name}/dt=2"]
    asked.clear()
    assert list(object_places.listed(place, "dt=2/0.csv")) == []
    assert asked == [folder.name, f"{folder.name}/dt=2"]

    folder.put("_temporary/0/part.csv", "")
    folder.put("other/x.csv", "")
    for pattern, read, folders in (
        ("*.csv", 0, []),
        ("dt=*/*.csv", 26, ["dt=1"] * 3 + ["dt=2"]),
        ("**/*", 27, ["dt=1"] * 3 + ["dt=2", "other"]),
    ):
        asked.clear()
        assert sum(len(page) for page in object_listing.matching_objects(place, pattern)) == read
        assert asked == [folder.name, *(f"{folder.name}/{name}" for name in folders)]


def test_who_may_not_read_is_told_what_to_do(settings: Settings, folder: HdfsFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that does not exist, is a file, or is refused."""
    folder.put("private/one.csv", "name,amount\na,1\n")
    folder.allow("private/one.csv", "600")

    def plan(below: str) -> Any:
        object_places._store.cache_clear()
        source = Files(folder.url + below, format="csv", schema=SCHEMA)
        return source.coordinator(settings).initialize_transaction(1, None, None)

    with pytest.raises(SourceUnreadable, match=f"{folder.url}/absent does not exist. Create the folder"):
        plan("/absent")
    with pytest.raises(SourceUnreadable, match=f"{folder.url}/private/one.csv is a file"):
        plan("/private/one.csv")
    monkeypatch.setenv("HADOOP_USER_NAME", "stranger")
    with pytest.raises(SourceUnreadable, match=r"/private/one\.csv may not be read: HDFS refuses stranger: Permission denied"):
        plan("/private")
    folder.allow("private", "700")
    with pytest.raises(SourceUnreadable, match="/private may not be read: HDFS refuses stranger: Permission denied"):
        plan("/private")
    monkeypatch.undo()
    object_places._store.cache_clear()


def test_without_its_nodes_the_source_is_unavailable_and_the_batch_is_read_later(
    settings: Settings, register: Callable[..., None], cluster: HdfsCluster, folder: HdfsFolder
) -> None:
    """First the DataNode is away, then the NameNode."""
    folder.put("1.csv", "name,amount\na,1\n")
    folder.put("2.csv", "name,amount\na,10\n")
    pipeline = inbox(folder)
    register(pipeline)
    assert steps.plan(settings, pipeline, run_id="run", max_batches=1) == [1]
    cluster.stop_one(DATANODE)
    try:
        with pytest.raises(SourceUnavailable, match=r"does not answer|HDFS answers"):
            steps.process(settings, pipeline, 1, owner="test")
        cluster.stop_one(NAMENODE)
        with pytest.raises(SourceUnavailable, match=rf"{cluster.url} does not answer: {cluster.address}: "):
            steps.plan(settings, pipeline, run_id="later")
    finally:
        cluster.stop()
        cluster.start()
    run_pipeline(settings, pipeline, run_id="later")
    assert stored(settings, pipeline) == [("a", 2, 11)]


def test_a_local_folder_stays_local_where_hadoop_has_another_file_system(
    settings: Settings, register: Callable[..., None], cluster: HdfsCluster, tmp_path: Path
) -> None:
    """The settings name HDFS for paths without a scheme; a file of the same path there is not read instead."""
    for format in ("csv", "parquet"):
        home = tmp_path / format
        home.mkdir()
        here, there = (parquet(["a"], [n]) if format == "parquet" else f"name,amount\na,{n}\n".encode() for n in (1, 2))
        (home / f"one.{format}").write_bytes(here)
        cluster.ask("PUT", "CREATE", f"{home}/one.{format}", there, overwrite="true")
        name = f"local_{format}"
        pipeline = Pipeline(name, Files(str(home), format=format, schema=SCHEMA, min_age_seconds=0), {name: STATE})
        register(pipeline)
        run_pipeline(settings, pipeline, run_id="run")
        assert stored(settings, pipeline) == [("a", 1, 1)]


CONFIGURED = {
    "dfs.ha.namenodes.lake": "one, two",
    "dfs.namenode.http-address.lake.one": "first:9870",
    "dfs.namenode.http-address.lake.two": "second:9870",
    "fs.defaultFS": "hdfs://alone:8020/",
    "dfs.namenode.http-address": "0.0.0.0:50070",
}


@pytest.mark.parametrize(
    ("url", "configuration", "expected"),
    [
        ("hdfs://lake", CONFIGURED, ("http", ["first:9870", "second:9870"])),
        ("hdfs://alone:8020", CONFIGURED, ("http", ["alone:50070"])),
        ("hdfs://other:8020", CONFIGURED, ("http", ["other:9870"])),
        ("hdfs://other:8020", {"dfs.http.policy": "HTTPS_ONLY"}, ("https", ["other:9871"])),
    ],
)
def test_the_addresses_of_namenodes_are_those_of_hadoops_own_settings(
    url: str, configuration: dict[str, str], expected: tuple
) -> None:
    """A name service, the file system of the settings, and another one at its usual port."""
    assert hdfs.http_service(url, configuration) == expected


def test_the_active_one_of_two_namenodes_answers(
    folder: HdfsFolder, cluster: HdfsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is away; the one that answered is asked first from then on."""
    store = hdfs.Hdfs(cluster.url)
    monkeypatch.setattr(store, "_service", hdfs.HttpService("http", ["127.0.0.1:9", cluster.address]))
    folder.put("one", "1")
    assert [found.size for page in store.pages(folder.name, None, lambda _folder: True) for found in page] == [1]
    assert store._service.addresses == [cluster.address, "127.0.0.1:9"]


def test_what_the_environment_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no XML, and Kerberos without its library."""
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    (tmp_path / "core-site.xml").write_text("<configuration>")
    with pytest.raises(Exception, match=re.escape(f"{tmp_path}/core-site.xml cannot be read")):
        hdfs.Hdfs("hdfs://lake")
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>hadoop.security.authentication</name><value>kerberos</value></property></configuration>"
    )
    with pytest.raises(Exception, match="Run: pip install requests-gssapi; and get a ticket with kinit"):
        hdfs.Hdfs("hdfs://lake")
