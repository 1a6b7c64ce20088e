"""The register of promises: what Tidegate says that it keeps, each line with the tests that hold it.

    python -m tests.promises                    prints the register and what is wrong
    python -m tests.promises --check            prints only what is wrong: as part of `make check`

Promises are found where they stand, such as a row of docs/limits.md. Tests name those that they hold, by a mark that stays
with a test that moves: ``@pytest.mark.promise("I4", "error:ATTEMPT_FENCED")``; ``"error:*"`` marks a test of all lines of a
kind. A mark without a promise is an error, and so is a promise without a mark. No invariant is left to `make soak`.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOAK, SLOW = "pytest.mark.soak", " (soak)"
Found = Iterator[tuple[str, str]]  # the part of an id after its kind, and what the promise says


class Kind(NamedTuple):
    """One kind of promise: where its lines stand, and how they are read."""

    title: str
    source: str
    read: Callable[[Path], Found]
    own: bool = True  # whether each line needs a test of its own, or those of all lines are enough


@dataclass
class Promise:
    """One line of the register."""

    says: str
    tests: list[str] = field(default_factory=list)
    of_all: list[str] = field(default_factory=list)
    held: bool = False


@cache
def _parsed(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def _rows(file: Path, *columns: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables that begin with these columns."""
    head = re.escape("| " + " | ".join(columns) + " |")
    for table in re.findall(rf"^{head}.*\n\|[-| ]+\n((?:\|.*\n?)+)", file.read_text(), re.MULTILINE):
        yield from ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())


def _slug(text: str) -> str:
    """Return the first words of a row, by which it is known."""
    return "-".join(re.findall(r"[a-z0-9_]+", re.sub(r"'s\b|\b(a|an|the)\b ", "", text.lower()))[:7])


def _described(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the public functions and classes of a module, with the first line of what they say of themselves."""
    for node in _parsed(file.read_text()):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, (ast.get_docstring(node) or "").partition("\n")[0]


def _assigned(file: Path, name: str) -> Any:
    """Return the literal value of a module's name."""
    return next(ast.literal_eval(node.value) for node in _parsed(file.read_text()) if _assigns(node, name))


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == [name]


def _faults(file: Path) -> Found:
    """Each cell that says something is a promise."""
    for fault, *effects in _rows(file, "fault"):
        for phase, effect in zip(("processing", "commit", "after"), effects, strict=True):
            if effect:
                yield f"{_slug(fault)}:{phase}", f"{fault}: {effect}"


def _limits(file: Path) -> Found:
    for limit, value, place, _ in _rows(file, "limit", "is", "where"):
        yield place.rpartition(" ")[2].strip("`"), f"{limit}: {value}"


def _errors(folder: Path) -> Found:
    pages = [page for page in sorted(folder.glob("*.md")) if page.stem != "README"]
    return ((page.stem, page.read_text().split("\n\n")[1]) for page in pages)


def _verbs(file: Path) -> Found:
    for verb, module in _assigned(file, "VERBS").items():
        yield verb, dict(_described(file.parent / f"commands/{module.replace('.', '/')}.py"))[verb]


def _schemas(folder: Path) -> Found:
    return ((file.stem, f"`tidegate {file.stem.replace('-', ' ')} --json`") for file in sorted(folder.glob("*.json")))


def _names(file: Path) -> Found:
    return ((name, f"`from tidegate import {name}`") for name in _assigned(file, "__all__"))


def _matching(pattern: str) -> Callable[[Path], Found]:
    return lambda file: iter(re.findall(pattern, file.read_text(), re.MULTILINE))


def _tables(*columns: str) -> Callable[[Path], Found]:
    return lambda file: ((_slug(cells[0]), ": ".join(cells[:2])) for cells in _rows(file, *columns))


KINDS = {
    "invariant": Kind("Invariants", "docs/protocol.md", _matching(r"^- \*\*(I\d+) ([^.*]+)\.\*\*")),
    "fault": Kind("Faults, by the phase that they meet", "docs/protocol.md", _faults),
    "limit": Kind("Limits", "docs/limits.md", _limits),
    "error": Kind("Errors, each raised", "docs/errors", _errors),
    "verb": Kind("Verbs", "tidegate/cli.py", _verbs),
    "json": Kind("Outputs for programs, each compared with its schema", "docs/json", _schemas),
    "name": Kind("Names that authors import", "tidegate/__init__.py", _names, own=False),
    "testing": Kind("Names for authors' tests", "jobs/testing.py", _described),
    "security": Kind("Attackers", "SECURITY.md", _tables("Attacker", "Defence")),
    "performance": Kind("Shortcuts that change nothing", "docs/performance.md", _tables("shortcut", "where")),
    "decision": Kind("Decisions", "docs/decisions/README.md", _matching(r"^## (\d{4}) (.+)$")),
}


def kind_of(promise: str) -> str:
    """Return the kind of a promise by its id; invariants are known by their numbers alone."""
    return promise.partition(":")[0] if ":" in promise else "invariant"


def promises(root: Path) -> dict[str, Promise]:
    """Return all promises by their ids, as they stand in their sources.

    Raises: SystemExit if two have one id, or a source has none, as when it was moved or its table looks otherwise.
    """
    found: dict[str, Promise] = {}
    for name, kind in KINDS.items():
        lines = list(kind.read(root / kind.source))
        ids = [part if name == "invariant" else f"{name}:{part}" for part, _ in lines]
        twice = [each for each, count in Counter(ids).items() if count > 1]
        if twice or not lines:
            raise SystemExit(f"{kind.source} has {'two promises ' + ', '.join(twice) if twice else 'no promise'} ({name}).")
        found |= {each: Promise(says) for each, (_, says) in zip(ids, lines, strict=True)}
    return found


def marks(root: Path) -> Iterator[tuple[str, str]]:
    """Yield each test with each promise that it is marked with; one that `make test` leaves out is called so."""
    for file in sorted((root / "tests").rglob("test_*.py")):
        body = _parsed(file.read_text())
        is_slow = "cluster" in file.parts or any(SOAK in ast.unparse(node) for node in body if _assigns(node, "pytestmark"))
        for node in (*body, *(method for kind in body if isinstance(kind, ast.ClassDef) for method in kind.body)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                soaks = is_slow or any(ast.unparse(mark) == SOAK for mark in node.decorator_list)
                test = f"{file.relative_to(root)}::{node.name}{SLOW if soaks else ''}"
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                        yield from ((test, ast.literal_eval(each)) for each in mark.args)


def hold(found: dict[str, Promise], marks: Sequence[tuple[str, str]]) -> list[str]:
    """Give each promise its tests; return what is wrong with marks."""
    wrong = []
    for test, pattern in marks:
        matching = [each for each in found if fnmatchcase(each, pattern)]
        for each in matching:
            (found[each].of_all if "*" in pattern else found[each].tests).append(test)
        if not matching:
            wrong.append(f"{test} is marked with {pattern}, which is no promise.")
    for each, promise in found.items():
        promise.held = bool(promise.tests or (promise.of_all and not KINDS[kind_of(each)].own))
    return wrong


def compare(found: dict[str, Promise]) -> list[str]:
    """Return which promises lack a test, and which invariants lack one in `make test`."""
    missing = [each for each, promise in found.items() if not promise.held]
    wrong = [f'{each} has no test: mark one that holds it, @pytest.mark.promise("{each}").' for each in missing]
    for each, promise in found.items():
        if kind_of(each) == "invariant" and promise.tests and all(test.endswith(SLOW) for test in promise.tests):
            wrong.append(f"{each} is an invariant, and only make soak tests it: {', '.join(promise.tests)}.")
    return wrong


def register(found: dict[str, Promise]) -> Iterator[str]:
    """Yield the lines of the register: each promise with what it says and its tests."""
    for name, kind in KINDS.items():
        yield f"\n{kind.title} ({kind.source})"
        for each, promise in found.items():
            if kind_of(each) == name:
                tests = sorted({*promise.tests, *promise.of_all})
                yield f"{each}: {promise.says}\n    {', '.join(tests) if promise.held else 'no test yet'}"


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    found = promises(root)
    wrong = [*hold(found, list(marks(root))), *compare(found)]
    shown = [] if arguments else register(found)
    sys.stdout.write("\n".join([*shown, *wrong, f"{len(found)} promises."]) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
