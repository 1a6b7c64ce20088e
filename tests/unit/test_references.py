"""References in code, tests and documents resolve within this repository."""

import ast
import re
import subprocess
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
TRACKED = [
    name
    for name in subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout.splitlines()
    if (PROJECT / name).exists()
]
WRITTEN = [name for name in TRACKED if name.endswith((".py", ".md", ".mako", ".yml", ".conf", ".sh", "Makefile"))]
RULES = set(re.findall(r"^- \*\*(I\d+) ", (PROJECT / "docs/protocol.md").read_text(), re.MULTILINE))
# Names of files of this project, as prose and docstrings write them.
FOLDERS = "examples|dags|jobs|state_store|migrations|tidegate|tests|docs|compose|deploy"
FILE = re.compile(rf"(?<![\w/.])((?:{FOLDERS})/[\w./-]*\w\.(?:py\.mako|py|md|sql|sh|yml|yaml|env|service))\b")
EXAMPLES = {"dags/orders.py", "tests/test_orders.py", "compose/local.env"}  # files that readers write
# A row of docs/map.md, and the files and folders that a cell names.
ROW = re.compile(r"^\| (?P<change>[^|]+) \| (?P<file>[^|]+) \| (?P<test>[^|]+) \|$", re.MULTILINE)
PLACE = re.compile(r"`([\w.-]+(?:/[\w./-]*|\.(?:md|yml)))`")
MAP = (PROJECT / "docs/map.md").read_text()
ROWS = [row for row in ROW.finditer(MAP) if row["file"] != "file"]
LINK = re.compile(r"\]\((?!https?://|#)([^)\s#]+)(?:#[^)]*)?\)")


def test_the_rules_are_numbered_without_gaps() -> None:
    """They are cited by their numbers."""
    assert {f"I{number}" for number in range(1, len(RULES) + 1)} == RULES


def unresolved(name: str, known: set[str]) -> set[str]:
    """Return the rules, files and links that a file names, and that there are not."""
    text = (PROJECT / name).read_text()
    missing = set(re.findall(r"\bI\d{1,2}\b", text)) - RULES
    if not name.startswith("tests/"):  # tests make up files
        missing |= set(FILE.findall(text)) - known
        links = LINK.findall(text) if name.endswith(".md") else []
        missing |= {link for link in links if not (PROJECT / name).parent.joinpath(link).exists()}
    return missing


def test_references_resolve() -> None:
    """Rules of the protocol, files, and links between documents."""
    known = {*TRACKED, *EXAMPLES}
    assert {name: missing for name in WRITTEN if (missing := unresolved(name, known))} == {}


def test_documents_keep_their_limits() -> None:
    """CONTRIBUTING and each record of a decision are short, and records come in the order of their numbers."""
    _, *records = re.split(r"^## ", (PROJECT / "docs/decisions/README.md").read_text(), flags=re.MULTILINE)
    assert len((PROJECT / "CONTRIBUTING.md").read_text().splitlines()) <= 120
    assert [record.partition("\n")[0] for record in records if len(record.split()) > 110] == []
    numbers = [int(record[:4]) for record in records]
    assert numbers == sorted(set(numbers))


def test_the_store_names_all_its_rooms() -> None:
    """A stranger finds the room for a change in the docstring of the package; no room imports one below it."""
    described = (PROJECT / "state_store/__init__.py").read_text().partition("The rooms;")[2].partition('"""')[0]
    rooms = re.findall(r"^    (\w+) {2,}", described, re.MULTILINE)
    assert sorted(rooms) == sorted(file.parent.name for file in (PROJECT / "state_store").glob("*/__init__.py"))
    upwards = re.compile(r"^\s*from tidegate\.state_store(?:\.(\w+))?[\w.]* import", re.MULTILINE)
    for number, room in enumerate(rooms):
        for file in (PROJECT / "state_store" / room).glob("*.py"):
            assert set(upwards.findall(file.read_text())) <= set(rooms[: number + 1]), file


def test_the_map_has_a_file_and_a_test_for_each_change() -> None:
    """In every row both are named, and exist."""
    lines = [line for line in MAP.splitlines() if line.startswith("| ") and not line.startswith("| change")]
    folders = {f"{parent}/" for name in TRACKED for parent in Path(name).parents}
    known = {*TRACKED, *folders, *(folder.rstrip("/") for folder in folders)}
    assert len(ROWS) == len(lines)
    for row in ROWS:
        files, tests = PLACE.findall(row["file"]), PLACE.findall(row["test"])
        assert files, row["change"]
        assert row["test"].startswith("none") or (tests and all(name.startswith("tests/") for name in tests)), row["change"]
        assert [name for name in files + tests if name not in known] == [], row["change"]


def test_the_map_names_every_module() -> None:
    """A module without a row is found by those alone who know its name. Those that hold a docstring alone need none."""
    named = {name for row in ROWS for name in PLACE.findall(row["file"])}
    modules = [
        name for name in TRACKED if name.endswith(".py") and name.startswith(("dags/", "jobs/", "state_store/", "tidegate/"))
    ]
    assert [name for name in modules if name not in named and len(ast.parse((PROJECT / name).read_text()).body) > 1] == []
