"""Java libraries are the ones that were tested: what a stack needs has checksums in the repository."""

import os
from pathlib import Path

import pytest

from state_store.errors import PermanentError
from tidegate.stack import kafka, maven

OTHERS = "org.example:thing:1.0"


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What the repository would send: files by their names."""
    sent: dict[str, bytes] = {}

    def resolve(_packages: object, workplace: Path, _target: Path) -> None:
        (workplace / "jars").mkdir()
        for name, content in sent.items():
            (workplace / "jars" / name).write_bytes(content)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(maven, "_resolve", resolve)
    return sent


@pytest.mark.parametrize("packages", [kafka.PACKAGES, kafka.SPARK_PACKAGES], ids=["broker", "connector"])
@pytest.mark.parametrize("what", ["another file under a known name", "a file more"])
def test_a_library_of_the_stack_that_is_another_is_thrown_away(
    packages: tuple[str, ...], what: str, fetched: dict[str, bytes]
) -> None:
    """A repository, or who is between, sends something else: nothing of it stays, and the message has both checksums."""
    _, artifact, version = packages[0].split(":")
    fetched[f"{artifact}-{version}.jar" if what.startswith("another") else "evil-1.0.jar"] = b"something else"

    with pytest.raises(PermanentError, match=r"is not what it has to be: its SHA-256 is [0-9a-f]{64}, jars.sha256 has"):
        maven.fetch(packages)

    assert not maven.folder(packages).exists()


def test_libraries_that_another_account_could_have_put_there_are_refused(fetched: dict[str, bytes]) -> None:
    """Where the cache is in a shared folder: they would run as part of Spark."""
    fetched["thing-1.0.jar"] = b"anything"
    maven.fetch([OTHERS])
    maven.fetch([OTHERS])
    jar = maven.folder([OTHERS]) / "thing-1.0.jar"

    for path in (jar, jar.parent, jar.parent.parent):
        mode = path.stat().st_mode
        path.chmod(0o777)
        with pytest.raises(PermanentError, match=f"{path} belongs to user"):
            maven.fetch([OTHERS])
        path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(jar, 61_000, 61_000)
        with pytest.raises(PermanentError, match=f"{jar} belongs to user 61000"):
            maven.fetch([OTHERS])


def test_a_library_of_an_authors_own_is_taken_as_the_repository_has_it(fetched: dict[str, bytes]) -> None:
    """For what only the settings name there is no checksum to compare with; what is known is compared all the same."""
    fetched["thing-1.0.jar"] = b"anything"
    maven.fetch([OTHERS])
    fetched[maven.PINS.read_text().split()[1]] = b"something else"

    assert (maven.folder([OTHERS]) / "thing-1.0.jar").read_bytes() == b"anything"
    with pytest.raises(PermanentError, match="is not what it has to be"):
        maven.fetch([OTHERS, "org.example:more:1.0"])
