"""The authors' names, `from tidegate import ...`, from a checkout or from the image's files alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tidegate
from tests.checkout import PACKAGES, SUBPACKAGES, copy_to

REPOSITORY = Path(__file__).resolve().parents[2]
PUBLIC = "from tidegate import " + ", ".join(tidegate.__all__)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shipped")
    copies = [
        line.split()[1:] for line in (REPOSITORY / "compose/Dockerfile").read_text().splitlines() if line.startswith("COPY")
    ]
    for package in PACKAGES:
        assert [package, package] in copies
    return copy_to(folder)


def run(program: str, folder: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "TIDEGATE_", "PYTHON"))}
    environ |= {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environ, capture_output=True, text=True, timeout=400, check=False
    )


def foreign(folder: Path, *packages: str) -> Path:
    """Make packages of the same names that belong to another project."""
    for package in packages:
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("HERE = 'another project'\n")
    return folder


@pytest.mark.promise("name:*")
def test_every_public_name_is_there_beside_packages_of_the_same_names(shipped: Path, tmp_path: Path) -> None:
    other = foreign(tmp_path / "other", *SUBPACKAGES)
    loaded = f"[__import__(name).HERE for name in {SUBPACKAGES!r}]"
    program = f"{PUBLIC}; import json; from tidegate import jobs, migrations; "
    program += f"print(json.dumps([jobs.__file__, batch_dag.__module__, *{loaded}]))"
    done = run(program, tmp_path, other, shipped)
    assert done.returncode == 0, done.stderr
    others = ["another project"] * len(SUBPACKAGES)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [str(shipped / "tidegate/jobs/__init__.py"), "tidegate.dags.batch_dag", *others]
