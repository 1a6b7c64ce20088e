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

ROOT = Path(__file__).resolve().parents[1]
NO_TEST = "no test yet"
SOAK, SLOW = "pytest.mark.soak", " (soak)"
Found = Iterator[tuple[str, str]]  # the part of an id after its kind, and what the promise says


@dataclass(frozen=True)
class Kind:
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
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _rows(file: Path, columns: Sequence[str]) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables that begin with these columns."""
    inside = False
    for line in file.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif cells[: len(columns)] == list(columns):
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            yield cells


def _slug(text: str) -> str:
    """Return the first words of a row, by which it is known."""
    return "-".join(re.findall(r"[a-z0-9_]+", re.sub(r"'s\b|\b(a|an|the)\b ", "", text.lower()))[:7])


def _docstring(node: ast.AST) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0] if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""


def _invariants(file: Path) -> Found:
    yield from re.findall(r"^- \*\*(I\d+) ([^.*]+)\.\*\*", file.read_text(), re.MULTILINE)


def _faults(file: Path) -> Found:
    """Each cell that says something is a promise."""
    for fault, *effects in _rows(file, ["fault"]):
        for phase, effect in zip(("processing", "commit", "after"), effects, strict=True):
            if effect:
                yield f"{_slug(fault)}:{phase}", f"{fault}: {effect}"


def _limits(file: Path) -> Found:
    for limit, value, place, _ in _rows(file, ["limit", "is", "where"]):
        yield place.rpartition(" ")[2].strip("`"), f"{limit}: {value}"


def _errors(folder: Path) -> Found:
    for page in sorted(folder.glob("*.md")):
        if page.stem != "README":
            yield page.stem, page.read_text().split("\n\n")[1]


def _verbs(file: Path) -> Found:
    (table,) = (node.value for node in _parsed(file.read_text()).body if _assigns(node, "VERBS"))
    for verb, module in ast.literal_eval(table).items():
        body = _parsed((file.parent / f"commands/{module.replace('.', '/')}.py").read_text()).body
        yield verb, next(_docstring(node) for node in body if getattr(node, "name", "") == verb)


def _schemas(folder: Path) -> Found:
    for file in sorted(folder.glob("*.json")):
        yield file.stem, f"`tidegate {file.stem.replace('-', ' ')} --json`"


def _names(file: Path) -> Found:
    (names,) = (node.value for node in _parsed(file.read_text()).body if _assigns(node, "__all__"))
    for name in ast.literal_eval(names):
        yield name, f"`from tidegate import {name}`"


def _testing(file: Path) -> Found:
    for node in _parsed(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, _docstring(node)


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == [name]


def _attackers(file: Path) -> Found:
    for attacker, defence in _rows(file, ["Attacker", "Defence"]):
        yield _slug(attacker), f"{attacker}: {defence}"


def _shortcuts(file: Path) -> Found:
    for shortcut, *_ in _rows(file, ["shortcut", "where"]):
        yield _slug(shortcut), shortcut


def _decisions(file: Path) -> Found:
    yield from re.findall(r"^## (\d{4}) (.+)$", file.read_text(), re.MULTILINE)


KINDS = {
    "invariant": Kind("Invariants", "docs/protocol.md", _invariants),
    "fault": Kind("Faults, by the phase that they meet", "docs/protocol.md", _faults),
    "limit": Kind("Limits", "docs/limits.md", _limits),
    "error": Kind("Errors, each raised", "docs/errors", _errors),
    "verb": Kind("Verbs", "tidegate/cli.py", _verbs),
    "json": Kind("Outputs for programs, each compared with its schema", "docs/json", _schemas),
    "name": Kind("Names that authors import", "tidegate/__init__.py", _names, own=False),
    "testing": Kind("Names for authors' tests", "jobs/testing.py", _testing),
    "security": Kind("Attackers", "SECURITY.md", _attackers),
    "performance": Kind("Shortcuts that change nothing", "docs/performance.md", _shortcuts),
    "decision": Kind("Decisions", "docs/decisions/README.md", _decisions),
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
        module = ast.parse(file.read_text())
        marks_of_module = [ast.unparse(node) for node in module.body if _assigns(node, "pytestmark")]
        is_slow = "cluster" in file.parts or any(SOAK in mark for mark in marks_of_module)
        of_classes = (node for kind in module.body if isinstance(kind, ast.ClassDef) for node in kind.body)
        for node in (*module.body, *of_classes):
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
    wrong = [
        f'{each} has no test: mark one that holds it, @pytest.mark.promise("{each}").'
        for each, promise in found.items()
        if not promise.held
    ]
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
                yield f"{each}: {promise.says}\n    {', '.join(tests) if promise.held else NO_TEST}"


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    found = promises(root)
    wrong = [*hold(found, list(marks(root))), *compare(found)]
    shown = [] if arguments else register(found)
    sys.stdout.write("\n".join([*shown, *wrong, f"{len(found)} promises."]) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
