"""Each planted fault still applies, breaks a promise that is made, and is looked for by tests that exist and test behaviour."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests import promises
from tests.checkout import REPOSITORY
from tests.mutants.catalogue import PROTOCOL, ROOMS
from tests.mutants.planted_fault import NOT_OF_BEHAVIOUR, DoesNotApply

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
        files = [test.partition("::")[0] for test in mutant.noticed_by]
        assert 0 < len(mutant.noticed_by) == len(set(mutant.noticed_by)), mutant.name
        assert not set(NOT_OF_BEHAVIOUR) & {*files, *mutant.noticed_by}, mutant.name
        assert [test for test in mutant.noticed_by if not _runs(test)] == [], mutant.name


@cache
def _runs(test: str) -> bool:
    """Return whether a test exists; one that only make soak runs is as good as none."""
    file, _, function = test.partition("::")
    if not (REPOSITORY / file).is_file():
        return False
    found = re.search(rf"^(.*)\n(?:async )?def {function}\(", (REPOSITORY / file).read_text(), re.MULTILINE)
    return not function or (found is not None and found[1] != "@pytest.mark.soak")
