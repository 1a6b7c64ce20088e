"""References in code, tests and documents resolve within this repository."""

import re
import subprocess
from collections import Counter

from tests.checkout import PACKAGES, REPOSITORY, tracked

WRITTEN = [name for name in tracked() if name.endswith((".py", ".md", ".mako", ".yml", ".conf", ".sh", "Makefile"))]
RULES = set(re.findall(r"^- \*\*(I\d+) ", (REPOSITORY / "docs/protocol.md").read_text(), re.MULTILINE))
# Names of files of this project, as prose and docstrings write them.
FOLDERS = "examples|dags|jobs|state_store|migrations|tidegate|tests|docs|compose|deploy"
FILE = re.compile(rf"(?<![\w/.])((?:{FOLDERS})/[\w./-]*\w\.(?:py\.mako|py|md|sql|sh|yml|yaml|env|service))\b")
KNOWN = {*tracked(), "dags/orders.py", "tests/test_orders.py", "compose/local.env"}  # readers write the last ones


def unresolved(name: str) -> set[str]:
    text = (REPOSITORY / name).read_text()
    missing = set(re.findall(r"\bI\d{1,2}\b", text)) - RULES
    if not name.startswith("tests/"):  # tests make up files
        links = re.findall(r"\]\((?!https?://|#)([^)\s#]+)(?:#[^)]*)?\)", text) if name.endswith(".md") else []
        missing |= {link for link in links if not (REPOSITORY / name).parent.joinpath(link).exists()}
        missing |= set(FILE.findall(text)) - KNOWN
    return missing


def test_references_resolve() -> None:
    assert {name: missing for name in WRITTEN if (missing := unresolved(name))} == {}


def test_every_module_says_what_it_is_about() -> None:
    lines = subprocess.check_output(["make", "-s", "map"], cwd=REPOSITORY, text=True).splitlines()
    said = dict(line.split(": ", 1) for line in lines if line)
    modules = [name for name in tracked() if name.endswith(".py") and name.partition("/")[0] in PACKAGES]
    modules = [name for name in modules if (REPOSITORY / name).read_text()]
    assert [name for name in modules if not re.match(r"[A-Z`]\w*.{10,}", said.get(name, ""))] == []
    assert [text for text, count in Counter(said.values()).items() if count > 1] == []
