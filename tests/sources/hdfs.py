"""A real HDFS for the tests: a NameNode and a DataNode as processes of their own, from Hadoop's own jar for small clusters."""

import http.client
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit

import pytest
import requests

from tests.conftest import running_stack
from tests.jars import fetch_or_skip
from tidegate.jobs.sources.files.stores import object_places
from tidegate.stack.components import java_libraries
from tidegate.stack.components.server_process import reserve_port, wait_until
from tidegate.stack.components.spark import java_program, spark_home
from tidegate.state_store import Settings

PACKAGES = ("org.apache.hadoop:hadoop-client-minicluster:3.5.0",)
NAMENODE, DATANODE = (f"org.apache.hadoop.hdfs.server.{name}" for name in ("namenode.NameNode", "datanode.DataNode"))
SECONDS = 60


class HdfsCluster:
    """One NameNode and one DataNode; `configuration` is the folder of the files that clients read too."""

    ports: ClassVar = 2

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.configuration = folder / "conf"
        self._folder = folder
        self._addresses = [f"127.0.0.1:{port}" for port in ports]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.configuration.mkdir()
        # Hadoop's clients take the file system for that of paths without a scheme.
        self.write_configuration("core-site", {"fs.defaultFS": self.url})
        here = "127.0.0.1:0"
        settings = {
            **self._namenodes(),
            "dfs.datanode.data.dir": f"file://{folder}/blocks",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.replication": "1",
            "dfs.blocksize": "1048576",
            "dfs.heartbeat.interval": "1",
            "dfs.namenode.safemode.extension": "0",
            "dfs.ls.limit": "10",  # entries of a folder at once, instead of 1000
            **{f"dfs.datanode.{name}": here for name in ("address", "http.address", "ipc.address")},
        }
        self.write_configuration("hdfs-site", settings)

    @property
    def url(self) -> str:
        """The URL of the file system."""
        return f"hdfs://{self._addresses[0]}"

    @property
    def address(self) -> str:
        """Where the active NameNode answers WebHDFS."""
        return self._addresses[1]

    def _namenodes(self) -> dict[str, str]:
        rpc, http = self._addresses
        return {
            "dfs.namenode.rpc-address": rpc,
            "dfs.namenode.http-address": http,
            "dfs.namenode.name.dir": f"file://{self._folder}/names",
        }

    def write_configuration(self, name: str, settings: dict[str, str]) -> None:
        """Write one of Hadoop's files of settings."""
        lines = (f"<property><name>{key}</name><value>{value}</value></property>" for key, value in settings.items())
        (self.configuration / f"{name}.xml").write_text(f"<configuration>{''.join(lines)}</configuration>")

    def start(self) -> None:
        """Make an empty file system, if there is none, start both processes, and wait until it takes files."""
        if not (self._folder / "names").exists():
            self.run(NAMENODE, "-format")
        self.start_one(NAMENODE)
        self.start_one(DATANODE)
        assert wait_until(self._takes_files, SECONDS), self.log()

    def run(self, program: str, *arguments: str) -> None:
        """Run one of Hadoop's programs to its end."""
        command = [*self._command(program), *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr

    def start_one(self, name: str, *arguments: str) -> None:
        """Start a NameNode or a DataNode; `name` is its class, with another name after a space if there are several."""
        with (self._folder / "log").open("ab") as log:
            command = [*self._command(name.partition(" ")[0]), *arguments]
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def stop_one(self, name: str) -> None:
        """Kill one of them."""
        process = self._processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Kill all."""
        for name in list(self._processes):
            self.stop_one(name)

    def log(self) -> str:
        """Return the end of what they have written."""
        return (self._folder / "log").read_text(errors="replace")[-2000:]

    def ask(self, method: str, operation: str, path: str, content: bytes | None = None, **parameters: Any) -> requests.Response:
        """Send a request of WebHDFS as the administrator; a file's bytes go on to the DataNode."""
        url = f"http://{self.address}/webhdfs/v1{quote(path)}"
        asked = {"op": operation, "user.name": self.owner, **parameters}
        answer = requests.request(method, url, params=asked, allow_redirects=method == "GET", timeout=SECONDS)
        if answer.status_code == 307:
            answer = requests.request(method, answer.headers["Location"], data=content, timeout=SECONDS)
        assert answer.ok, answer.text
        return answer

    @property
    def owner(self) -> str:
        """The user who started the NameNode: its administrator."""
        return Path.home().owner()

    def make_folder(self, name: str) -> "HdfsFolder":
        """Create an empty folder."""
        self.ask("PUT", "MKDIRS", f"/{name}")
        return HdfsFolder(self, name)

    def _command(self, name: str) -> list[str]:
        jars = (path for path in (spark_home() / "jars").glob("*.jar") if path.name.startswith(("hadoop", "slf4j", "log4j")))
        classes = os.pathsep.join(map(str, (self.configuration, f"{java_libraries.folder(PACKAGES)}/*", *jars)))
        return [java_program(), "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", classes, name]

    def _takes_files(self) -> bool:
        assert all(process.poll() is None for process in self._processes.values()), self.log()
        try:
            self.ask("PUT", "CREATE", "/.started", b"", overwrite="true")
        except (requests.RequestException, AssertionError):
            return False
        return True


class HdfsFolder:
    """A folder, and what another program would do with it; as `tests.sources.s3.Bucket` is for a bucket."""

    def __init__(self, cluster: HdfsCluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.url = f"{cluster.url}/{name}"

    def put(self, key: str, content: bytes | str) -> None:
        """Write a file; an older one of the same name is overwritten."""
        written = content.encode() if isinstance(content, str) else content
        self.cluster.ask("PUT", "CREATE", f"/{self.name}/{key}", written, overwrite="true")

    def get(self, key: str) -> bytes:
        """Return the bytes of a file."""
        return self.cluster.ask("GET", "OPEN", f"/{self.name}/{key}").content

    def delete(self, key: str) -> None:
        """Delete a file or a folder."""
        self.cluster.ask("DELETE", "DELETE", f"/{self.name}/{key}", recursive="true")

    def append(self, key: str, content: str) -> None:
        """Write more to the end of a file."""
        self.cluster.ask("POST", "APPEND", f"/{self.name}/{key}", content.encode())

    def rename(self, key: str, to: str) -> None:
        """Move a file within the folder."""
        self.cluster.ask("PUT", "RENAME", f"/{self.name}/{key}", destination=f"/{self.name}/{to}")

    def set_time(self, key: str, milliseconds: int) -> None:
        """Set the time of a file's last change."""
        self.cluster.ask("PUT", "SETTIMES", f"/{self.name}/{key}", modificationtime=milliseconds)

    def allow(self, key: str, permission: str) -> None:
        """Set who may read and write a file or a folder, in octal."""
        self.cluster.ask("PUT", "SETPERMISSION", f"/{self.name}/{key}", permission=permission)

    @contextmanager
    def being_written(self, key: str, content: str) -> Iterator[None]:
        """Begin to write a file, and close it at the end."""
        path = f"http://{self.cluster.address}/webhdfs/v1/{self.name}/{quote(key)}"
        asked = {"op": "CREATE", "user.name": self.cluster.owner}
        answer = requests.put(path, params=asked, allow_redirects=False, timeout=SECONDS)
        to = urlsplit(answer.headers["Location"])
        connection = http.client.HTTPConnection(str(to.hostname), to.port or 80, timeout=SECONDS)
        connection.putrequest("PUT", f"{to.path}?{to.query}")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        connection.send(f"{len(content.encode()):x}\r\n{content}\r\n".encode())
        yield
        connection.send(b"0\r\n\r\n")
        assert connection.getresponse().status == 201
        connection.close()


@contextmanager
def running_cluster(kind: type[HdfsCluster] = HdfsCluster) -> Iterator[HdfsCluster]:
    """Run a cluster, whose settings are named in the environment meanwhile."""
    fetch_or_skip(*PACKAGES)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-hdfs-")))
        environment = opened.enter_context(pytest.MonkeyPatch.context())
        cluster = kind(folder, [reserve_port(None, opened) for _ in range(kind.ports)])
        environment.setenv("HADOOP_CONF_DIR", str(cluster.configuration))
        environment.delenv("HADOOP_USER_NAME", raising=False)
        object_places._store.cache_clear()
        opened.callback(object_places._store.cache_clear)
        opened.callback(cluster.stop)
        cluster.start()
        yield cluster


@contextmanager
def stack_beside_hdfs(home: Path, kind: type[HdfsCluster] = HdfsCluster) -> Iterator[tuple[Settings, HdfsCluster]]:
    """Run a cluster, and an embedded stack whose Spark reads from it."""
    with running_cluster(kind) as cluster, running_stack(home) as settings:
        yield settings, cluster
