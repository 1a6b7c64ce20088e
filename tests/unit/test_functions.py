"""Functions stay small enough to be understood at one reading."""

import ast

from tests.checkout import REPOSITORY

MOST_DECISIONS, MOST_PARAMETERS = 12, 6
PUBLIC_DOOR = ("jobs/engine/local_run.py: run_pipeline",)  # its keywords are those of `tidegate run`
DECISIONS = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def decisions(node: ast.AST) -> int:
    """Count the points at which a function's course divides; those of functions and classes inside it are their own."""
    return sum(
        isinstance(child, DECISIONS)
        + (len(child.values) - 1 if isinstance(child, ast.BoolOp) else 0)
        + (len(child.ifs) if isinstance(child, ast.comprehension) else 0)
        + (0 if isinstance(child, Function | ast.ClassDef) else decisions(child))
        for child in ast.iter_child_nodes(node)
    )


def test_no_function_decides_too_much_or_has_too_many_parameters() -> None:
    wrong = {}
    for package in ("jobs", "state_store", "tidegate"):
        for file in (REPOSITORY / package).rglob("*.py"):
            for node in (found for found in ast.walk(ast.parse(file.read_text())) if isinstance(found, Function)):
                name = f"{file.relative_to(REPOSITORY).as_posix()}: {node.name}"
                named = [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]
                count = len({*named} - {"self", "cls"})
                # The verbs of the command line, in `tidegate`, have a parameter per option.
                is_long = count > MOST_PARAMETERS and package != "tidegate" and name not in PUBLIC_DOOR
                if is_long or decisions(node) > MOST_DECISIONS:
                    wrong[name] = decisions(node), count
    assert wrong == {}
