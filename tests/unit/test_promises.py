"""The register of promises: nothing leaves it, and nothing comes into it, unseen."""

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests import promises

MADE_UP = "tests/unit/test_made_up.py"
SOURCES = ["docs", "SECURITY.md", "tidegate/__init__.py", "tidegate/cli.py", "tidegate/commands", "jobs/testing.py"]


class Project:
    """A copy of the places where promises stand, with a test for some of them, and another for all the rest."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for source in SOURCES:
            (root / source).parent.mkdir(parents=True, exist_ok=True)
            if (promises.ROOT / source).is_dir():
                shutil.copytree(promises.ROOT / source, root / source, ignore=shutil.ignore_patterns("*.png", "__pycache__"))
            else:
                shutil.copyfile(promises.ROOT / source, root / source)
        self.mark("I4", "limit:WINDOW", "error:*")
        found = promises.promises(root)
        assert promises.hold(found, list(promises.marks(root))) == []
        self.mark(*(each for each, promise in found.items() if not promise.held), file="tests/unit/test_rest.py")

    def mark(self, *ids: str, file: str = MADE_UP) -> None:
        (self.root / file).parent.mkdir(parents=True, exist_ok=True)
        named = ", ".join(f'"{each}"' for each in ids)
        (self.root / file).write_text(f"@pytest.mark.promise({named})\nasync def test_one() -> None: ...\n")

    def change(self, name: str, before: str, after: str) -> None:
        """Replace all that matches in a file, which has to have it."""
        text, count = re.subn(before, after, (self.root / name).read_text(), flags=re.MULTILINE)
        assert count
        (self.root / name).write_text(text)

    def check(self) -> int:
        return promises.main(["--check"], self.root)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_the_register_names_what_lacks_a_test_or_a_promise(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong() -> str:
        assert project.check() == 1
        return capsys.readouterr().out

    assert promises.main([], project.root) == 0
    said = capsys.readouterr().out
    assert re.search(rf"^limit:WINDOW: .*\n    {MADE_UP}::test_one$", said, re.MULTILINE)
    # A new promise without a test, and a mark of one that is gone.
    (project.root / "docs/errors/TOO_MUCH.md").write_text("# TOO_MUCH\n\nIt is too much.\n")
    project.mark("limit:WINDOW", "error:*")
    assert re.search("I4 has no test.*error:TOO_MUCH has no test", wrong(), re.DOTALL)
    project.mark("I4", "limit:WINDOW", "error:TOO_MUCH")
    assert project.check() == 0
    project.change("docs/limits.md", "`WINDOW`", "`WIDTH`")
    assert "is marked with limit:WINDOW, which is no promise" in wrong()
    assert promises.main(["--rename", "limit:WINDOW", "limit:WIDTH"], project.root) == 0


def test_no_line_of_a_source_is_left_out() -> None:
    def found(file: str, pattern: str) -> int:
        return len(re.findall(pattern, (promises.ROOT / file).read_text(), re.MULTILINE))

    counts = Counter(promises.kind_of(each) for each in promises.promises(promises.ROOT))
    assert counts["invariant"] == found("docs/protocol.md", r"^- \*\*I\d+ ")
    assert counts["limit"] == found("docs/limits.md", r"^\| (?!limit \|)")
    assert counts["error"] == len(list((promises.ROOT / "docs/errors").glob("*.md"))) - 1  # README.md
    assert counts["json"] == len(list((promises.ROOT / "docs/json").glob("*.json")))
    assert counts["security"] == found("SECURITY.md", r"^\| (?!Attacker)")
    others = "shortcut|design|one record|one batch|pipelined"
    assert counts["performance"] == found("docs/performance.md", rf"^\| (?!{others}).*\|$")
    faults = (promises.ROOT / "docs/protocol.md").read_text().partition("## Faults")[2].partition("Each is tested")[0]
    rows = [line.split("|")[2:5] for line in faults.splitlines() if line.startswith("|")][2:]
    assert counts["fault"] == sum(bool(cell.strip()) for row in rows for cell in row)
