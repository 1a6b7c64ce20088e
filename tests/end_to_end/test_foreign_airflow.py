"""The wheel in an Airflow that another team uses too: an environment without this repository, with packages `dags` and `jobs`.

The lowest versions that `pyproject.toml` allows are installed, then the highest, on which all other tests run.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkout import REPOSITORY, SUBPACKAGES, build_wheel
from tests.end_to_end.conftest import wait_for
from tests.servers import QUICK_TO_START
from tidegate.airflow_client import AirflowClient
from tidegate.state_store import Settings

FOREIGN = Path(__file__).resolve().parent / "foreign"
UV = Path(sys.executable).with_name("uv")
ORDERS = {"1.csv": [("Lisbon", 7), ("Porto", 5), ("Lisbon", 1)], "2.csv": [("Porto", 3)], "3.csv": [("Faro", 9), ("Porto", -2)]}
# Where the other team's code, or the project's, notes what is imported: the Dag processor and tasks read Dag files.
PROCESSES = ("dag-file", "triggerer", "worker", "task", "executor")
LOADED = {
    "triggerer": "tidegate.dags.batch_trigger",
    "worker": "tidegate.dags.batch_dag",
    "task": "tidegate.jobs.engine.worker",
}
OF_THE_SHELL = ("AIRFLOW", "PG", "PYSPARK_", "PYTHON", "SPARK_", "TIDEGATE_", "VIRTUAL_ENV")


def bundle(name: str, folder: Path) -> dict[str, Any]:
    """Return a folder of Dag files, as Airflow is told of it."""
    return {"name": name, "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle", "kwargs": {"path": str(folder)}}


@dataclass(frozen=True)
class Foreign:
    """An environment with the wheel, the other team's packages, and a project."""

    folder: Path

    @property
    def programs(self) -> Path:
        return self.folder / "environment/bin"

    @property
    def shop(self) -> Path:
        return self.folder / "shop"

    def __call__(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_THE_SHELL)}
        bundles = [bundle("team", self.folder / "team/dags"), bundle("shop", self.shop / "dags")]
        environment |= {
            "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(bundles),
            "JDK_JAVA_OPTIONS": QUICK_TO_START,
            "PATH": os.pathsep.join([str(self.programs), os.defpath]),
            "PYTHONPATH": str(self.folder / "team"),
            "SEEN": str(self.folder / "seen"),
            "TIDEGATE_HOME": str(self.shop),
            "TIDEGATE_MIN_FILE_AGE_SECONDS": "0",
        }
        command = [self.programs / "tidegate", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"tidegate {' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))

    def install(self, lock: str) -> None:
        """Make the environment, with the versions of a lock and the wheel, as docs/airflow-workers.md says."""
        python = ["--python", self.programs / "python"]
        self._uv("venv", "--python", sys.executable, self.folder / "environment")
        for name in ("requirements-build.txt", lock):
            locked = ["--require-hashes", "--no-deps", "-r", REPOSITORY / name]  # `check` tells whether any is missing
            self._uv("pip", "install", *python, "--no-build-isolation", *locked)
        self._uv("pip", "install", *python, "--no-deps", build_wheel(self.folder))
        self._uv("pip", "check", *python)

    def _uv(self, *arguments: str | Path) -> None:
        done = subprocess.run(
            [UV, "--quiet", "--no-config", *arguments], cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def seen(self, process: str) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted((self.folder / "seen").glob(f"{process}-*.json"))]


@pytest.fixture(params=["requirements-lowest.txt", "requirements.txt"])
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Foreign]:
    """The wheel beside another team's packages, and a project whose stack is up."""
    foreign = Foreign(tmp_path)
    try:
        foreign.install(request.param)
        shutil.copytree(FOREIGN / "team", tmp_path / "team")
        (tmp_path / "seen").mkdir()
        foreign("init", "shop")
        shutil.copytree(FOREIGN / "shop", foreign.shop, dirs_exist_ok=True)
        try:
            foreign("up", "--wait-seconds", "500")
            yield foreign
        finally:
            foreign("down", "--delete-data", "--yes")
    finally:
        shutil.rmtree(tmp_path)


def deliver(shop: Path) -> list[dict[str, Any]]:
    """Write the shop's files; return the state that they add up to."""
    (shop / "orders").mkdir()
    for name, rows in ORDERS.items():
        with (shop / "orders" / name).open("w", newline="") as file:
            csv.writer(file).writerows([("shop", "euros"), *rows])
    rows = [row for file in ORDERS.values() for row in file]
    orders, cents = Counter(shop for shop, _ in rows), Counter()
    for name, euros in rows:
        cents[name] += 100 * euros
    return [{"shop": name, "orders": orders[name], "cents": cents[name]} for name in sorted(orders)]


@pytest.mark.soak
def test_the_wheel_works_in_an_airflow_of_others(foreign: Foreign) -> None:
    """A pipeline of a project and a Dag of the other team, in one Airflow; no process knows this repository."""
    expected = deliver(foreign.shop)
    foreign("migrate", "--new", "orders")
    assert [file.name for file in (foreign.shop / "migrations").glob("*.py")] == ["0001_orders.py"]
    foreign("migrate")
    foreign("trigger", "orders", "--wait")
    found = foreign.json("inspect", "orders", "--state", "revenue")
    assert [{name: value for name, value in row.items() if name != "txid"} for row in found] == expected

    settings = Settings.load({"TIDEGATE_HOME": str(foreign.shop)})
    airflow = AirflowClient(settings)
    run_id = airflow.trigger("report", {})
    state = wait_for(lambda: {"success", "failed"}.intersection([airflow.run_state("report", run_id)]), "their run")
    assert state == {"success"}

    check_documents(foreign, settings)
    check_processes(foreign)


def check_documents(foreign: Foreign, settings: Settings) -> None:
    """What verbs and the page read from files is in the wheel."""
    assert foreign("error", "HOLE_DETECTED").startswith("HOLE_DETECTED")
    assert {*foreign.json("error")} == {file.stem for file in (REPOSITORY / "docs/errors").glob("*.md")} - {"README"}
    assert foreign.json("schema", "status") == json.loads((REPOSITORY / "docs/json/status.json").read_text())
    assert foreign.json("why", "orders")["causes"]
    assert foreign.json("doctor", "--component", "command-line")["missing"] == []
    assert settings.airflow_password_file
    login = {"username": settings.airflow_user, "password": settings.airflow_password_file.read_text()}
    token = httpx.post(f"{settings.airflow_url}/auth/token", json=login).json()["access_token"]
    page = httpx.get(f"{settings.airflow_url}/tidegate/", cookies={"_token": token})
    assert "./assets/index-" in page.text


def check_processes(foreign: Foreign) -> None:
    """Our modules come from the wheel, theirs from their folder, and none from this repository."""
    package = next((foreign.folder / "environment/lib").glob("python*/site-packages/tidegate"))
    for process in PROCESSES:
        assert foreign.seen(process), f"{process} has not noted anything"
        for noted in foreign.seen(process):
            files: dict[str, str] = noted["files"]
            assert [place for place in (*files.values(), *noted["path"]) if Path(place).is_relative_to(REPOSITORY)] == []
            assert noted["path"].index(str(package.parent)) > noted["path"].index(str(Path(os.__file__).parent)), process
            ours = {name: file for name, file in files.items() if name.split(".")[0] == "tidegate"}
            strange = {name: file for name, file in ours.items() if not Path(file).is_relative_to(package)}
            assert {name.rpartition(".")[0] for name in strange} <= {"tidegate.jobs.pipelines"}
            assert [file for file in strange.values() if not Path(file).is_relative_to(foreign.shop)] == []
            assert process not in LOADED or LOADED[process] in ours, sorted(ours)
            theirs = {name: file for name, file in files.items() if name.split(".")[0] in SUBPACKAGES}
            assert "jobs.probes" in theirs
            assert [name for name, file in theirs.items() if not Path(file).is_relative_to(foreign.folder / "team")] == []
