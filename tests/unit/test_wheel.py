"""The wheel has the files of the repository's packages: all of them, and no others."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from tests.checkout import REPOSITORY, SUBPACKAGES

# Read from the checkout by the verbs `error`, `why` and `schema`.
DOCUMENTS = ("docs/errors/", "docs/json/")
SOURCES_OF_THE_PAGE = "tidegate/page/frontend/"
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def tracked() -> list[str]:
    """Return the names of the files in Git that are no links."""
    names = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (REPOSITORY / name).is_file() and not (REPOSITORY / name).is_symlink()]


def test_the_wheel_has_what_the_repository_has(tmp_path: Path) -> None:
    """Built in a copy, as building writes files of its own beside the packages."""
    copy = tmp_path / "copy"
    parts = ("tidegate", *SUBPACKAGES, "docs", "pyproject.toml", "README.md")
    for name in tracked():
        if name.startswith(parts):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, copy / name)
    for link in (REPOSITORY / "tidegate").iterdir():
        if link.is_symlink():
            (copy / "tidegate" / link.name).symlink_to(link.readlink())
    built = subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=copy, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr

    with ZipFile(tmp_path / built.stdout.splitlines()[-1]) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        f"tidegate/{name}" for name in tracked() if name.startswith((*(f"{part}/" for part in SUBPACKAGES), *DOCUMENTS))
    }
    expected |= {name for name in tracked() if name.startswith("tidegate/") and not name.startswith(SOURCES_OF_THE_PAGE)}
    assert found == expected - {"tidegate/dags/.airflowignore"}
