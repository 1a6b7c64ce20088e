"""Imports go one way, and frequent imports stay light."""

import ast
import json
import re
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import pytest

from tests.checkout import PACKAGES, REPOSITORY, module_of, python
from tests.examples import EXAMPLES
from tidegate import state_store

# Airflow itself imports these files, and Spark the last one: their docstrings say what for.
AIRFLOWS_OWN = (
    "tidegate/page/plugin.py",
    "tidegate/stack/airflow_settings/airflow_local_settings.py",
    "tidegate/airflow_policy.py",
    "tidegate/stack/spark_settings/tidegate_python_daemon.py",
)
FILES = [
    path
    for package in PACKAGES
    for file in sorted((REPOSITORY / package).rglob("*.py"))
    if (path := file.relative_to(REPOSITORY).as_posix()) not in AIRFLOWS_OWN
]
MAY_IMPORT = {
    "dags": {"dags", "jobs", "state_store"},
    "jobs": {"jobs", "state_store"},
    "migrations": {"migrations", "state_store"},
    "tidegate": {"tidegate", "jobs", "migrations", "state_store"},
}
PAGE = "tidegate/page/"  # runs inside Airflow's api-server
DOOR = "tidegate/__init__.py"  # offers the public names of all packages to authors of pipelines and Dags
OF_THE_STORE = {*sys.stdlib_module_names, "sqlalchemy", "psycopg2", "state_store"}
THIRD_PARTY = {"airflow": {"dags"}, "pyspark": {"jobs"}, "alembic": {"migrations"}}


@cache
def imports(path: str) -> list[tuple[int, str]]:
    """Return line and full module name of every import in a file, also inside functions and for types."""
    found = []
    for node in ast.walk(ast.parse((REPOSITORY / path).read_text(), path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found += [(node.lineno, str(node.module)), *((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)]
    return found


def package_of(name: str) -> str:
    """Return the folder of a module of ours, as in `tidegate.jobs.pipeline`, or the outermost package of another one."""
    first, *rest = name.split(".")
    return rest[0] if first == "tidegate" and rest and rest[0] in PACKAGES else first


def may_import(path: str, name: str) -> bool:
    package, root = path.partition("/")[0], package_of(name)
    if package == "state_store":
        return root in OF_THE_STORE
    if root in PACKAGES:
        return root in MAY_IMPORT[package] or path == DOOR
    if root == "airflow" and path.startswith(PAGE):
        return True
    return root != "tests" and package in THIRD_PARTY.get(root, {package})


def test_imports_go_one_way() -> None:
    assert not may_import("state_store/store.py", "tidegate.jobs.states")
    assert not may_import("state_store/store.py", "pandas")
    assert not may_import("tidegate/cli.py", "pyspark.sql")
    found = [(path, line, name) for path in FILES for line, name in imports(path)]
    assert [f"{path}:{line} imports {name}" for path, line, name in found if not may_import(path, name)] == []


@cache
def imported_modules() -> dict[str, set[str]]:
    """Return, by module, the modules that it imports; not the packages that it is in."""
    modules = {module_of(path): path for path in FILES}

    def module_in(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    found = {}
    for module, path in modules.items():
        names = {name for _, name in imports(path)}
        inner = map(module_in, names - {name.rpartition(".")[0] for name in names})
        found[module] = {other for other in inner if other and not f"{module}.".startswith(f"{other}.")}
    return found


def test_no_imports_go_in_a_circle() -> None:
    assert "tidegate.jobs.sources.kafka.plan" in imported_modules()["tidegate.jobs.sources.binding"]
    try:
        TopologicalSorter(imported_modules()).prepare()
    except CycleError as error:
        pytest.fail(f"imports go in a circle: {' <- '.join(error.args[1])}")


def test_rooms_of_the_store_import_only_those_above_them() -> None:
    rooms = re.findall(r"^    (\w+) {2,}\S", (state_store.__doc__ or "").partition("The rooms;")[2], re.MULTILINE)
    assert {file.parent.name for file in (REPOSITORY / "state_store").glob("*/__init__.py")} == set(rooms)
    place = {f"tidegate.state_store.{room}.": number for number, room in enumerate(rooms)}

    def room_of(module: str) -> int:
        return next((number for start, number in place.items() if module.startswith(start)), len(rooms))

    found = imported_modules()
    store = [module for module in found if module.startswith("tidegate.state_store.")]
    assert [f"{one} imports {other}" for one in store for other in found[one] if room_of(other) > room_of(one)] == []


def test_tests_reach_into_the_store_through_one_module() -> None:
    public = ("tidegate.state_store", "tidegate.state_store.base.errors")
    files = (file.relative_to(REPOSITORY).as_posix() for file in (REPOSITORY / "tests").rglob("*.py"))
    wrong = [
        f"{path}:{line} imports {name}"
        for path in files
        if path != "tests/store.py"
        if "state_store" in (REPOSITORY / path).read_text()
        for line, name in imports(path)
        if name.startswith("tidegate.state_store") and name not in (*public, *(f"{public[0]}.{x}" for x in state_store.__all__))
        if not name.startswith(f"{public[1]}.")
    ]
    assert wrong == []


HEAVY = ("pyspark", "pandas", "pyarrow")
SLOW = ("sqlalchemy", "airflow", "rich", "httpx", *HEAVY)
DAGS = "Dags are parsed again and again, and by every task"
# By what is frequent: what it must not load, and its program.
ABSENT = {
    **{"imports": HEAVY, "a lookup": SLOW, "a completion": SLOW[:2] + HEAVY, "a command": HEAVY, "the stack": SLOW},
    DAGS: ("pyspark", "tidegate.jobs.pipelines.flights"),
}
FREQUENT = {
    "imports": """
from tidegate.state_store import StateStore
from tidegate import Count, Files, Kafka, Pipeline, PostgresTable, State
import tidegate.cli
from tidegate.jobs.registry import all_pipelines
assert all_pipelines().pipelines
import tidegate.dags.batch_dag
""",
    DAGS: """
from airflow.dag_processing.dagbag import DagBag
from tidegate.jobs.registry import pipeline_names
assert len(DagBag("dags").dags) == len(pipeline_names())
""",
    "a lookup": """
from tidegate.commands.show import inspect_verb
from tidegate.jobs.registry import find_pipeline
from tidegate.state_store.states import key_lookup
find_pipeline("flights")
""",
    "a completion": """
from tidegate.cli import main
sys.argv = ["tidegate"]
os.environ |= {"_TIDEGATE_COMPLETE": "bash_complete", "COMP_WORDS": "tidegate inspect fl", "COMP_CWORD": "2"}
main()
""",
    "a command": """
import gc
from tidegate.cli import main
def collections():
    return sum(generation["collections"] for generation in gc.get_stats())
before, sys.argv = collections(), ["tidegate", "--help"]
try:
    main()
finally:
    assert collections() - before <= 1, "of the few objects before main"
""",
    "the stack": "from tidegate import stack, jobs\n",
}


@pytest.mark.promise("performance:bytecode-is-compiled-at-set-up")
def test_no_process_compiles_a_library() -> None:
    found = [spec.origin for name in ("airflow", "pandas") if (spec := find_spec(name)) and spec.origin]
    files = [file for origin in found for file in Path(origin).parent.rglob("*.py")]
    assert [file for file in files if not Path(cache_from_source(str(file))).exists()] == []
    assert len(files) > 1_000


@pytest.mark.promise("performance:get-uses-psycopg2-alone", "performance:each-verb-loads-its-own-module-parsed")
@pytest.mark.promise("performance:no-garbage-is-looked-for-while-command", "performance:up-asks-all-components-at-once-without")
@pytest.mark.parametrize("frequent", FREQUENT)
def test_what_is_frequent_loads_nothing_slow(tmp_path: Path, frequent: str) -> None:
    begin = f"import atexit, json, os, sys\nos.chdir({str(EXAMPLES)!r})\nos.environ['TIDEGATE_HOME'] = {str(EXAMPLES)!r}\n"
    begin += "atexit.register(lambda: print(json.dumps(sorted(sys.modules))))\n"
    done = python(begin + FREQUENT[frequent], tmp_path)
    assert done.returncode == 0, done.stderr
    seen = set(json.loads(done.stdout.splitlines()[-1]))
    assert "tidegate.jobs" in seen
    assert seen.isdisjoint(ABSENT[frequent])
