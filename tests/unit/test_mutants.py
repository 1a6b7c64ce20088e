"""Each planted fault still applies, breaks a promise that is made, and is looked for by tests that exist and test behaviour."""

import subprocess
import sys
from pathlib import Path

from tests import promises
from tests.checkout import REPOSITORY
from tests.mutants.catalogue import PROTOCOL, ROOMS
from tests.mutants.planted_fault import NOT_OF_BEHAVIOUR, DoesNotApply, places_of_tests

ALL = [mutant for of_room in ROOMS.values() for mutant in of_room]


def test_there_are_many_and_each_has_a_name_of_its_own_and_breaks_a_promise() -> None:
    names, known = [mutant.name for mutant in ALL], promises.promises(REPOSITORY)
    assert len(set(names)) == len(names)
    assert sum(len(ROOMS[room]) for room in PROTOCOL) >= 80
    assert sum(len(of_room) for room, of_room in ROOMS.items() if room not in PROTOCOL) >= 30
    assert {mutant.name: mutant.breaks for mutant in ALL if mutant.breaks not in known} == {}


def test_each_applies(tmp_path: Path) -> None:
    wrong = []
    for mutant in ALL:
        try:
            planted = mutant.planted_in(REPOSITORY)
        except DoesNotApply as why:
            wrong.append(str(why))
            continue
        assert planted != (REPOSITORY / mutant.file).read_text(), mutant.name
        if mutant.file.endswith(".py"):
            (tmp_path / f"{mutant.name}.py").write_text(planted)
    assert wrong == []
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821", tmp_path]
    checked = subprocess.run(ruff, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_each_is_looked_for_by_tests_of_behaviour() -> None:
    for mutant in ALL:
        assert all("/" in test or len(places_of_tests().get(test, [])) == 1 for test in mutant.noticed_by), mutant.name
        assert 0 < len(mutant.tests) == len(set(mutant.tests)), mutant.name
        assert {test.partition("::")[0] for test in mutant.tests} & set(NOT_OF_BEHAVIOUR) == set(), mutant.name
        assert all((REPOSITORY / test.partition("::")[0]).is_file() for test in mutant.tests), mutant.name
