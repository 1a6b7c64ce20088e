"""A real S3 server for the tests, as a process of its own: S3Proxy over a folder, with a key that it checks."""

import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import obstore
import pytest
from obstore.store import S3Store

from tests.checkout import REPOSITORY
from tests.jars import S3PROXY, fetch_or_skip
from tidegate.jobs.sources.files.stores import object_places
from tidegate.stack.components import java_libraries
from tidegate.stack.components.server_process import reserve_port, wait_until
from tidegate.stack.components.spark import java_program

KEY, SECRET = "tidegate-tests", "not-a-secret-of-anyone"
SECONDS = 60
PAGE = REPOSITORY / "docs" / "storage.md"


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
        self._process: Any = None

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        options = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", f"{java_libraries.folder(self.packages)}/*"]
        command, environment = [java_program(), *options, *self._program()], {**os.environ, "LC_ALL": "C.UTF-8"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        assert wait_until(self._answers, SECONDS), self._log.read_text()[-2000:]

    def _program(self) -> list[str]:
        return [f"-Dlogback.configurationFile={self._logging}", "org.gaul.s3proxy.Main", "--properties", str(self._properties)]

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

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
            self.send(
                "PUT", f"/{name}?versioning", "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
            )
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
        """Put a CSV file of one record."""
        self.put(key, f"name,amount\n{name},{amount}\n")

    def get(self, key: str) -> bytes:
        return bytes(obstore.get(self.store, key).bytes())

    def delete(self, key: str) -> None:
        (self.folder / key).unlink()  # obstore deletes by a request that S3Proxy does not know


def spark_packages() -> str:
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith("spark_packages = "))
    return line.partition("=")[2].strip().strip('"')


@contextmanager
def running_server(kind: type[S3Server] = S3Server) -> Iterator[S3Server]:
    fetch_or_skip(*kind.packages)
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-s3-"))
        environment = opened.enter_context(pytest.MonkeyPatch.context())
        server = kind(Path(folder), reserve_port(None, opened))
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            environment.delenv(name)
        usual: dict[str, Any] = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_REGION": "us-east-1"}
        for name, value in {**usual, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}.items():
            environment.setenv(name, value)
        object_places._store.cache_clear()
        opened.callback(object_places._store.cache_clear)
        opened.callback(server.stop)
        server.start()
        yield server
