"""The authors' names, `from tidegate import ...`, from a checkout or from the image's files alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tidegate
from tidegate import jobs
from tidegate.dags.batch_dag import batch_dag

REPOSITORY = Path(__file__).resolve().parents[2]
PUBLIC = "from tidegate import " + ", ".join(tidegate.__all__)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image's files, as the Dockerfile copies them, in another folder."""
    folder = tmp_path_factory.mktemp("shipped")
    copies = [
        line.split()[1:] for line in (REPOSITORY / "compose/Dockerfile").read_text().splitlines() if line.startswith("COPY")
    ]
    for package in ("state_store", "migrations", "jobs", "dags", "tidegate"):
        assert [package, package] in copies
        shutil.copytree(REPOSITORY / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(program: str, folder: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that finds packages in these folders, and none of this repository's."""
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
def test_every_public_name_is_there(shipped: Path, tmp_path: Path) -> None:
    """From the image's files, outside any checkout."""
    done = run(f"{PUBLIC}; import json, jobs; print(json.dumps([jobs.__file__, batch_dag.__module__]))", tmp_path, shipped)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [str(shipped / "jobs/__init__.py"), "tidegate.dags.batch_dag"]


def test_the_old_names_are_the_same_things() -> None:
    """Pipelines that import from `jobs` and `dags` go on working."""
    assert tidegate.Pipeline is jobs.Pipeline
    assert tidegate.batch_dag is batch_dag
    assert set(jobs.__all__) <= set(tidegate.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Pipelines'"):
        _ = tidegate.Pipelines


@pytest.mark.parametrize("package", ["jobs", "dags", "state_store"])
def test_another_package_of_the_name_is_named(shipped: Path, tmp_path: Path, package: str) -> None:
    """First on the path, it would be taken for Tidegate's: the import names it, and says what to do."""
    other = foreign(tmp_path / "other", package)
    done = run("from tidegate import Pipeline", tmp_path, other, shipped)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith(
        f"ImportError: Tidegate's package {package} is in {shipped / package}, but Python found another one"
    )
    assert str(other / package / "__init__.py") in message
    assert f"Put {shipped} first on PYTHONPATH, or rename the other package." in message


def test_a_package_of_the_name_further_down_does_no_harm(shipped: Path, tmp_path: Path) -> None:
    """If Tidegate's packages come first, they are found; the other project's files are not touched."""
    other = foreign(tmp_path / "other", "jobs", "dags", "migrations")
    done = run(f"{PUBLIC}; from tidegate import jobs; print(jobs.__file__)", tmp_path, shipped, other)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(shipped / "jobs/__init__.py")


def test_a_migration_can_be_written_from_the_shipped_files(shipped: Path) -> None:
    """The template and the ledger are there; tests/integration/test_migrations.py covers `migrate --new`."""
    for file in ("migrations/script.py.mako", "migrations/versions/0001_ledger.py", "state_store/schema.sql"):
        assert (shipped / file).is_file()
