"""Functions stay small enough to be understood at one reading."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MOST_DECISIONS, MOST_PARAMETERS = 12, 6
# Not in `tidegate`: the verbs of the command line have a parameter per option.
LIMITED_IN_PARAMETERS = ("jobs", "state_store")
PUBLIC_DOOR = ("jobs/engine/local_run.py: run_pipeline",)  # its keywords are those of `tidegate run`
DECISIONS = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(package: str) -> Iterator[tuple[str, Function]]:
    for file in sorted((REPOSITORY / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, Function):
                yield f"{file.relative_to(REPOSITORY).as_posix()}: {node.name}", node


def decisions(node: ast.AST) -> int:
    """Count the points at which a function's course divides; those of functions and classes inside it are their own."""
    count = sum(
        isinstance(child, DECISIONS)
        + (len(child.values) - 1 if isinstance(child, ast.BoolOp) else 0)
        + (len(child.ifs) if isinstance(child, ast.comprehension) else 0)
        + (0 if isinstance(child, Function | ast.ClassDef) else decisions(child))
        for child in ast.iter_child_nodes(node)
    )
    return int(count)


def parameters(function: Function) -> int:
    given = function.args
    named = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")]) + bool(given.vararg) + bool(given.kwarg)


@pytest.mark.parametrize("package", ["jobs", "state_store", "tidegate"])
def test_no_function_decides_too_much(package: str) -> None:
    found = {name: decisions(function) for name, function in functions(package)}
    assert {name: count for name, count in found.items() if count > MOST_DECISIONS} == {}


@pytest.mark.parametrize("package", LIMITED_IN_PARAMETERS)
def test_no_function_has_too_many_parameters(package: str) -> None:
    found = {name: parameters(function) for name, function in functions(package) if name not in PUBLIC_DOOR}
    assert {name: count for name, count in found.items() if count > MOST_PARAMETERS} == {}
