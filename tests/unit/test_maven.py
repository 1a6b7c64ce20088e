"""The stack's Java libraries are the tested ones: the repository has their checksums."""

import os
from pathlib import Path

import pytest

from tidegate.stack.components import java_libraries, kafka
from tidegate.state_store.base.errors import PermanentError

OTHERS = "org.example:thing:1.0"


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    sent: dict[str, bytes] = {}

    def resolve(_packages: object, workplace: Path, _target: Path) -> None:
        (workplace / "jars").mkdir()
        for name, content in sent.items():
            (workplace / "jars" / name).write_bytes(content)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(java_libraries, "_resolve", resolve)
    return sent


@pytest.mark.promise("security:package-index-or-maven-repository-that-sends")
@pytest.mark.parametrize("change", ["another file under a known name", "one more file"])
def test_a_library_of_the_stack_with_another_checksum_is_deleted(change: str, fetched: dict[str, bytes]) -> None:
    _, artifact, version = kafka.PACKAGES[0].split(":")
    fetched[f"{artifact}-{version}.jar" if change.startswith("another") else "evil-1.0.jar"] = b"something else"
    with pytest.raises(PermanentError, match=r"is not what it has to be: its SHA-256 is [0-9a-f]{64}, jars.sha256 has"):
        java_libraries.fetch(kafka.PACKAGES)
    assert not java_libraries.folder(kafka.PACKAGES).exists()


@pytest.mark.promise("security:another-account-in-file-system")
def test_libraries_that_another_account_could_have_put_there_are_refused(fetched: dict[str, bytes]) -> None:
    fetched["thing-1.0.jar"] = b"anything"
    java_libraries.fetch([OTHERS])
    java_libraries.fetch([OTHERS])
    jar = java_libraries.folder([OTHERS]) / "thing-1.0.jar"

    for path in (jar, jar.parent, jar.parent.parent):
        mode = path.stat().st_mode
        path.chmod(0o777)
        with pytest.raises(PermanentError, match=f"{path} belongs to user"):
            java_libraries.fetch([OTHERS])
        path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(jar, 61_000, 61_000)
        with pytest.raises(PermanentError, match=f"{jar} belongs to user 61000"):
            java_libraries.fetch([OTHERS])
