"""Every error has its page, which says what the code does; every page is about an error, and its commands exist."""

import ast
import re
from functools import cache
from importlib import import_module

import pytest

from tests import command_lines
from tests.checkout import REPOSITORY, module_of
from tests.unit.test_imports import FILES
from tidegate.cli import exit_code
from tidegate.explain import error_pages
from tidegate.state_store.base.errors import TidegateError

SECTIONS = ["How it comes about", "What the ledger did", "What to do"]
INLINE = re.compile(r"`(tidegate [a-z][^`]*)`")
# A verb, a pipeline that is filled in, and what follows it.
PRINTED = re.compile(r'tidegate [a-z]+(?: [a-z]+)? 7(?: (?:7|[A-Z]{3,}|--[a-z-]+(?: (?:7|"[^"]*"|\.\.\.|[A-Z]+))?))*')
SHOWN = re.compile(r"^\s*\$ (tidegate .*)$", re.MULTILINE)


@cache
def errors() -> dict[str, type[TidegateError]]:
    """Return the product's errors by code, found in its sources: the root, and all that inherit from it."""
    classes: dict[str, tuple[str, set[str]]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse((REPOSITORY / path).read_text(), path)):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = module_of(path), {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    names = {"TidegateError"}
    while more := {name for name, (_, bases) in classes.items() if name not in names and names & bases}:
        names |= more
    kinds = [getattr(import_module(classes[name][0]), name) for name in sorted(names)]
    return {kind("").code: kind for kind in kinds}


CODES = error_pages.codes()


@pytest.mark.promise("error:*")
def test_every_error_has_a_page_that_agrees_with_the_code_and_every_page_an_error() -> None:
    assert {"SOURCE_CHANGED", "AIRFLOW_UNAVAILABLE", "MACHINE_REFUSES"} <= set(errors())
    assert sorted(errors()) == list(CODES)
    for code in CODES:
        page, error = error_pages.markdown(code), errors()[code]("")
        assert page.startswith(f"# {code}\n\n")
        assert re.findall(r"^## (.*)$", page, re.MULTILINE) == SECTIONS, code
        ((fault, number),) = re.findall(r"^Fault: ([A-Z]+)\. Exit code: (\d+)\.$", page, re.MULTILINE)
        assert (fault, int(number)) == (error.fault.name, exit_code(error)), code
        assert 12 <= len(page.splitlines()) <= 50, code
        assert max(map(len, page.splitlines())) <= 150, code
        assert set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", page)) - set(errors()) <= {"TIDEGATE_TRUSTED_USERS", "TIDEGATE_HOME"}, code
        assert SHOWN.findall(page) or INLINE.findall(page), code
        for line in SHOWN.findall(page):
            command_lines.check(line)
        for line in INLINE.findall(page):
            command_lines.check_mentioned(line)


def test_commands_that_messages_print_can_be_typed() -> None:
    """Those in the product's strings whose first argument is filled in; each such place has 7 here."""
    printed = set()
    for path in FILES:
        for node in ast.walk(ast.parse((REPOSITORY / path).read_text())):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in node.values)
                printed |= {(path, re.sub(r"\b[A-Z]{3,}\b", "7", line)) for line in PRINTED.findall(text)}
    assert len(printed) > 30
    for path, line in sorted(printed):
        command = command_lines.check(line)
        assert "--yes" in line or "--yes" not in {name for option in command.params for name in option.opts}, (path, line)
