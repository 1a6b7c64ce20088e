"""References in code, tests and documents resolve within this repository."""

import re
import subprocess
from collections import Counter
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
LINK = re.compile(r"\]\((?!https?://|#)([^)\s#]+)(?:#[^)]*)?\)")


def unresolved(name: str, known: set[str]) -> set[str]:
    text = (PROJECT / name).read_text()
    missing = set(re.findall(r"\bI\d{1,2}\b", text)) - RULES
    if not name.startswith("tests/"):  # tests make up files
        missing |= set(FILE.findall(text)) - known
        links = LINK.findall(text) if name.endswith(".md") else []
        missing |= {link for link in links if not (PROJECT / name).parent.joinpath(link).exists()}
    return missing


def test_references_resolve() -> None:
    known = {*TRACKED, *EXAMPLES}
    assert {name: missing for name in WRITTEN if (missing := unresolved(name, known))} == {}


def test_every_module_says_what_it_is_about() -> None:
    folders = ("dags/", "jobs/", "state_store/", "migrations/", "tidegate/")
    modules = [name for name in TRACKED if name.endswith(".py") and name.startswith(folders)]
    lines = [line for line in subprocess.check_output(["make", "-s", "map"], cwd=PROJECT, text=True).splitlines() if line]
    said = dict(line.split(": ", 1) for line in lines)
    unsaid = [name for name in modules if (PROJECT / name).read_text() and not re.match(r"[A-Z`]\w*.{10,}", said.get(name, ""))]
    assert unsaid == []
    assert [text for text, count in Counter(said.values()).items() if count > 1] == []
