"""Each planted fault still applies, breaks a promise that is made, and is looked for by tests that exist and test behaviour."""

import ast
import re
from pathlib import Path

import pytest

from tests import promises
from tests.mutants.catalogue import PROTOCOL, ROOMS
from tests.mutants.planted_fault import NOT_OF_BEHAVIOUR, DoesNotApply, Mutant

ROOT = Path(__file__).resolve().parents[2]
ALL = [mutant for of_room in ROOMS.values() for mutant in of_room]
ONE = Mutant("one", "I1", "a.py", "Two.half", "n < 1", "n <= 1")
CODE = "def half(n):\n    return n < 1\n\n\nclass Two:\n    def half(self, n):\n        return n < 1\n\n\nx = 1 < 1\n"


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    """At least 80 are in the protocol's code, and 30 elsewhere."""
    names = [mutant.name for mutant in ALL]
    assert len(set(names)) == len(names)
    assert sum(len(ROOMS[room]) for room in PROTOCOL) >= 80
    assert sum(len(of_room) for room, of_room in ROOMS.items() if room not in PROTOCOL) >= 30


def test_each_applies() -> None:
    """What it changes stands once in its function, and the code with the fault can be compiled."""
    wrong = []
    for mutant in ALL:
        try:
            planted = mutant.planted_in(ROOT)
        except DoesNotApply as why:
            wrong.append(str(why))
            continue
        assert planted != (ROOT / mutant.file).read_text(), mutant.name
        if mutant.file.endswith(".py"):
            compile(planted, mutant.name, "exec")
    assert wrong == []


def test_each_breaks_a_promise() -> None:
    """Its id is one of docs/promises.md."""
    known = promises.promises(ROOT)
    assert {mutant.name: mutant.breaks for mutant in ALL if mutant.breaks not in known} == {}


def test_each_is_looked_for_by_tests_of_behaviour() -> None:
    """Files and functions exist; none is of those that read the code, and none stands twice."""
    missing = []
    for mutant in ALL:
        files = [test.partition("::")[0] for test in mutant.noticed_by]
        assert mutant.noticed_by, mutant.name
        assert len(set(mutant.noticed_by)) == len(mutant.noticed_by), mutant.name
        assert not set(NOT_OF_BEHAVIOUR) & {*files, *mutant.noticed_by}, mutant.name
        missing += [f"{mutant.name}: {test}" for test in mutant.noticed_by if not _exists(test)]
    assert missing == []


def _exists(test: str) -> bool:
    file, _, function = test.partition("::")
    return (ROOT / file).is_file() and (not function or f"\ndef {function}(" in (ROOT / file).read_text())


def test_a_fault_is_planted_in_its_function_alone() -> None:
    """Not in another one of the same name, nor outside."""
    planted = ONE.planted(CODE)
    assert planted == CODE.replace("        return n < 1", "        return n <= 1")
    assert ast.parse(planted)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (CODE.replace("n < 1", "n > 1"), "has 0 times"),
        (CODE.replace("        return n < 1", "        return n < 1 or n < 1"), "has 2 times"),
        (CODE.replace("class Two", "class Three"), "0 functions"),
    ],
)
def test_a_fault_that_does_not_apply_says_so(code: str, why: str) -> None:
    """The code has changed: somebody has to look."""
    with pytest.raises(DoesNotApply, match=re.escape(why)):
        ONE.planted(code)


def test_a_statement_of_sql_ends_with_its_quotes() -> None:
    """A function has semicolons within."""
    function = "CREATE FUNCTION {}() AS $$\nBEGIN\n  a := 1;\nEND $$;\n\n"
    code = function.format("f") + function.format("g") + "GRANT a TO b;\n"
    of_g = Mutant("g", "I1", "a.sql", "CREATE FUNCTION g", "a := 1", "a := 2")
    assert of_g.planted(code) == code.replace("a := 1", "a := 2").replace("a := 2", "a := 1", 1)
    assert Mutant("grant", "I1", "a.sql", "GRANT a", "b", "c").planted(code).endswith("GRANT a TO c;\n")
