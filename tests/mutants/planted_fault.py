"""A planted fault: where it is, what it changes, which promise it breaks, and which tests may notice it."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from tests.checkout import REPOSITORY

# Tests that read the code or the documents, and not what the code does: a fault that they notice has not been noticed.
NOT_OF_BEHAVIOUR = (
    "tests/unit/test_functions.py",
    "tests/unit/test_imports.py",
    "tests/unit/test_mutants.py",
    "tests/unit/test_promises.py",
    "tests/unit/test_references.py",
    "tests/unit/test_requirements.py",
)
CHANGED = re.compile(r"\[-(?P<old>.*?)-\]|\{\+(?P<new>.*?)\+\}", re.DOTALL)
MODULE = "(module)"  # the function of what stands outside of all functions
_parsed = lru_cache(maxsize=8)(ast.parse)  # a catalogue goes from file to file


class DoesNotApply(Exception):
    """The code has changed, and the fault is not where it was; its text says why."""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    `breaks` is the id of a promise (tests/promises.py). `function` is a function, `Class.method` or MODULE; in SQL, the
    beginning of a statement. `old`, which stands in it exactly once, becomes `new`. `noticed_by` are functions or files of
    tests, the cheapest first.
    """

    name: str
    breaks: str
    file: str
    function: str
    old: str
    new: str
    noticed_by: tuple[str, ...]

    @property
    def tests(self) -> list[str]:
        """What pytest calls the tests that may notice the fault."""
        return [place for test in self.noticed_by for place in ([test] if "/" in test else places_of_tests()[test])]

    def planted_in(self, root: Path) -> str:
        """Return the text of the file in a checkout with the fault in it.

        Raises: DoesNotApply.
        """
        if not (root / self.file).is_file():
            raise DoesNotApply(f"{self.name}: there is no file {self.file}")
        text = (root / self.file).read_text()
        start, end = (_sql_statement if self.file.endswith(".sql") else _python_function)(text, self.function)
        found = text.count(self.old, start, end)
        if found != 1:
            raise DoesNotApply(f"{self.name}: {self.file}, {self.function}, has {found} times: {self.old}")
        place = text.index(self.old, start, end)
        return text[:place] + self.new + text[place + len(self.old) :]


def in_file(file: str) -> Callable[[str, str, str], Callable[..., Mutant]]:
    """Return what makes the faults of one file: `FILE(name, breaks, function)(change, *noticed_by)`.

    A change is what Git's word diff shows: "kept [-old-]{+new+} kept".
    """

    def named(name: str, breaks: str, function: str) -> Callable[..., Mutant]:
        def changed(change: str, *noticed_by: str) -> Mutant:
            old, new = (CHANGED.sub(lambda part, side=side: part[side] or "", change) for side in ("old", "new"))
            assert old != new, f"{name}: mark what changes: kept [-old-]{{+new+}} kept"
            return Mutant(name, breaks, file, function, old, new, noticed_by)

        return changed

    return named


@cache
def places_of_tests() -> dict[str, list[str]]:
    """Return what pytest calls the tests of each name; those that only make soak runs are left out."""
    places: dict[str, list[str]] = {}
    for file in sorted(REPOSITORY.glob("tests/*/test_*.py")):
        for mark, name in re.findall(r"^(.*)\n(?:async )?def (test_\w+)\(", file.read_text(), re.MULTILINE):
            if mark != "@pytest.mark.soak":
                places.setdefault(name, []).append(f"{file.relative_to(REPOSITORY)}::{name}")
    return places


def _python_function(text: str, name: str) -> tuple[int, int]:
    """Return where a function begins and ends; for MODULE, where the file does."""
    if name == MODULE:
        return 0, len(text)
    places = [node for found, node in _functions(_parsed(text)) if found == name]
    if len(places) != 1:
        raise DoesNotApply(f"there are {len(places)} functions {name}")
    lines = text.splitlines(keepends=True)
    first, last = places[0].lineno - 1, places[0].end_lineno
    return len("".join(lines[:first])), len("".join(lines[:last]))


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _sql_statement(text: str, beginning: str) -> tuple[int, int]:
    """Return where the statement that begins so begins and ends; a function ends with its quotes."""
    starts = [match.start() for match in re.finditer("^" + re.escape(beginning), text, re.MULTILINE)]
    if len(starts) != 1:
        raise DoesNotApply(f"{len(starts)} statements begin with {beginning}")
    line_end = text.index(";\n", starts[0]) + 1
    quotes = text.find("$$", starts[0], line_end)
    return starts[0], line_end if quotes < 0 else text.index("$$;", starts[0]) + len("$$;")
