"""HDFS with two NameNodes under one name: the active one is found, also after another has become active."""

import os
from collections.abc import Iterator

import pytest

from tests import steps
from tests.conftest import register_pipelines
from tests.sources.beside_store import server, template
from tests.sources.feeds import SCHEMA
from tests.sources.hdfs import DATANODE, NAMENODE, HdfsCluster, stack_beside_hdfs
from tests.sources.test_objects import STATE, parquet, stored
from tidegate.jobs import Files, Inputs, Pipeline
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings

__all__ = ["server", "template"]  # fixtures

pytestmark = pytest.mark.skipif(not os.environ.get("CLUSTER"), reason="make cluster-test")

PACKAGE = "org.apache.hadoop.hdfs"
ADMINISTRATION = f"{PACKAGE}.tools.DFSHAAdmin"


class HdfsPair(HdfsCluster):
    """Two NameNodes, of which one is active, and a DataNode."""

    ports = 4

    active = "one"

    @property
    def url(self) -> str:
        """The URL of the file system: its name is no host."""
        return "hdfs://lake"

    @property
    def address(self) -> str:
        """Where the active NameNode answers WebHDFS."""
        return self._addresses[1 if self.active == "one" else 3]

    def start(self) -> None:
        """Make an empty file system, and start all three."""
        self.run(NAMENODE, "-Ddfs.ha.namenode.id=one", "-format")
        self.start_one(f"{NAMENODE} one", "-Ddfs.ha.namenode.id=one")
        assert wait_until(lambda: self._becomes_active("one"), 60), self.log()
        self.run(NAMENODE, "-Ddfs.ha.namenode.id=two", "-bootstrapStandby")
        self.start_one(f"{NAMENODE} two", "-Ddfs.ha.namenode.id=two")
        self.start_one(DATANODE)
        assert wait_until(self._takes_files, 60), self.log()

    def fail_over(self) -> None:
        """Make the second NameNode the active one, and the first a standby, which refuses to read."""
        self.run(ADMINISTRATION, "-transitionToStandby", "one")
        self.run(ADMINISTRATION, "-transitionToActive", "two")
        self.active = "two"
        assert wait_until(self._takes_files, 60), self.log()

    def _becomes_active(self, name: str) -> bool:
        try:
            self.run(ADMINISTRATION, "-transitionToActive", "--forceactive", name)  # the other need not be there yet
        except AssertionError:
            return False
        return True

    def _namenodes(self) -> dict[str, str]:
        found = {
            "dfs.nameservices": "lake",
            "dfs.ha.namenodes.lake": "one,two",
            "dfs.namenode.shared.edits.dir": f"file://{self._folder}/edits",
            "dfs.client.failover.proxy.provider.lake": f"{PACKAGE}.server.namenode.ha.ConfiguredFailoverProxyProvider",
            "dfs.ha.fencing.methods": "shell(/bin/true)",
        }
        for name, rpc, http in (("one", *self._addresses[:2]), ("two", *self._addresses[2:])):
            found |= {
                f"dfs.namenode.rpc-address.lake.{name}": rpc,
                f"dfs.namenode.http-address.lake.{name}": http,
                f"dfs.namenode.name.dir.lake.{name}": f"file://{self._folder}/names_{name}",
            }
        return found


@pytest.fixture(scope="module")
def beside_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Settings, HdfsPair]]:
    """Both NameNodes, and a stack whose Spark reads from them."""
    with stack_beside_hdfs(tmp_path_factory.mktemp("hdfs_pair"), HdfsPair) as (settings, pair):
        assert isinstance(pair, HdfsPair)
        yield settings, pair


def test_another_namenode_becomes_active_in_the_middle_of_a_run(
    settings: Settings, beside_store: tuple[Settings, HdfsPair]
) -> None:
    """Between plan and read, by our tasks and by Spark's reader; later the first one dies."""
    pair = beside_store[1]
    text, columns = pair.make_folder("text"), pair.make_folder("columns")
    source = Inputs(
        {
            "text": Files(text.url, format="csv", schema=SCHEMA),
            "columns": Files(columns.url, schema=SCHEMA),
        }
    )
    pipeline = Pipeline("inbox", source, {"per_name": STATE}, retry_delay_seconds=0)
    register_pipelines(settings, pipeline)

    def put(number: int) -> None:
        text.put(f"{number}.csv", f"name,amount\na,{10**number}\n")
        columns.put(f"{number}.parquet", parquet(["b"], [10**number]))

    put(0)
    put(1)
    assert steps.plan(settings, pipeline, run_id="run") == [1, 2]
    steps.process(settings, pipeline, 1, owner="test")
    steps.commit(settings, pipeline, 1, owner="test")
    pair.fail_over()
    run_pipeline(settings, pipeline, run_id="run")
    assert stored(settings, pipeline) == [("a", 2, 11), ("b", 2, 11)]
    put(2)
    pair.stop_one(f"{NAMENODE} one")
    run_pipeline(settings, pipeline, run_id="later")
    assert stored(settings, pipeline) == [("a", 3, 111), ("b", 3, 111)]
