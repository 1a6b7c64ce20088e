"""The register of promises: nothing leaves it, and nothing comes into it, unseen."""

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import promises

MADE_UP = "tests/unit/test_made_up.py"
A_TEST = '@pytest.mark.promise("I4", "limit:WINDOW", "error:*")\ndef test_one() -> None: ...\n'
SOURCES = [
    "docs",
    "SECURITY.md",
    "CHANGELOG.md",
    "tidegate/__init__.py",
    "tidegate/cli.py",
    "tidegate/commands",
    "jobs/testing.py",
]
Run = Callable[[], str]


class Project:
    """A copy of the places where promises stand, with a test of its own and the register of both."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for source in SOURCES:
            (root / source).parent.mkdir(parents=True, exist_ok=True)
            if (promises.ROOT / source).is_dir():
                shutil.copytree(promises.ROOT / source, root / source, ignore=shutil.ignore_patterns("*.png", "__pycache__"))
            else:
                shutil.copyfile(promises.ROOT / source, root / source)
        self.write(MADE_UP, A_TEST)
        self.write("CHANGELOG.md", "# Changelog\n\n## Unreleased\n")
        found = promises.promises(root)
        assert promises.hold(found, list(promises.marks(root))) == []
        self.write(promises.REGISTER, promises.written(found))

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def read(self, name: str = promises.REGISTER) -> str:
        """Return a file's text; that of the register by default."""
        return (self.root / name).read_text()

    def change(self, name: str, before: str, after: str) -> None:
        """Replace all that matches in a file, which has to have it."""
        text, count = re.subn(before, after, self.read(name), flags=re.MULTILINE)
        assert count
        self.write(name, text)

    def line(self, promise: str) -> str | None:
        """Return who holds a promise, by the register."""
        return {line["id"]: line["held"] for line in promises.LINE.finditer(self.read())}.get(promise)

    def is_accepted(self) -> bool:
        """Write the register; return whether all is well then."""
        return promises.main([], self.root) == 0 == promises.main(["--check"], self.root)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project whose register is right."""
    return Project(tmp_path)


@pytest.fixture
def refused(project: Project, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what the check says, which has to fail; and writing, too, unless the register is only out of date."""

    def run() -> str:
        before = project.read()
        assert promises.main(["--check"], project.root) == 1
        said = capsys.readouterr().out
        assert "is out of date" in said or promises.main([], project.root) == 1
        assert project.read() == before
        return said

    return run


def test_a_register_that_is_right_passes_and_counts(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines without a test are listed, and counted."""
    before = project.read()
    assert project.is_accepted()
    assert "\nno test yet: limit:MAX_VALUE_BYTES\n" in capsys.readouterr().out
    assert (project.line("limit:MAX_VALUE_BYTES"), project.read()) == (promises.NO_TEST, before)


def test_no_line_leaves_the_register_unseen(project: Project, refused: Run) -> None:
    """Neither the line of a promise that still stands in its source, nor its last test; another test will do."""
    right = project.read()
    project.change(promises.REGISTER, r"^\| `error:OVERFLOW` .*\n", "")
    assert "error:OVERFLOW is new" in refused()
    project.write(promises.REGISTER, right)
    project.change(MADE_UP, '"I4", ', "")
    assert "I4 has lost its last test" in refused()
    project.write("CHANGELOG.md", "### Removed: fences\n\n- `I4`\n")
    assert "I4 has lost its last test" in refused()
    project.write("tests/test_second.py", '@pytest.mark.promise("I4")\nasync def test_two() -> None: ...\n')
    assert project.is_accepted()


def test_a_promise_that_is_gone_needs_a_line_in_the_changelog(project: Project, refused: Run) -> None:
    """Below a heading that says so. The test that held it goes, too, or its mark."""
    project.change("docs/limits.md", r"^.*`WINDOW`.*\n", "")
    project.change(MADE_UP, '"limit:WINDOW", ', "")
    for changelog in ("", "### Added: nothing\n\n- `limit:WINDOW`\n"):
        project.write("CHANGELOG.md", changelog)
        assert "limit:WINDOW is in the register and not in its source" in refused()
    project.write("CHANGELOG.md", "### Removed: a limit\n\n- Whatever was longer is taken (`limit:WINDOW`).\n")
    assert "is out of date" in refused()
    assert project.is_accepted()
    assert project.line("limit:WINDOW") is None


def test_a_new_promise_needs_a_test(project: Project, refused: Run) -> None:
    """It never comes into the register without one; a test of all lines of its kind is not enough."""
    project.change("docs/errors/README.md", r"^\| \[OVERFLOW\]", "| [TOO_MUCH](OVERFLOW.md) | It is too much. |\n\\g<0>")
    assert "error:TOO_MUCH is new" in refused()
    project.change(MADE_UP, '"I4"', '"I4", "error:TOO_MUCH"')
    assert project.is_accepted()
    assert project.line("error:TOO_MUCH") == f"`{MADE_UP}::test_one`"


def test_no_line_of_a_source_is_left_out() -> None:
    """As many promises as a plain search finds."""

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
