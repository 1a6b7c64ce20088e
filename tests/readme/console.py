"""The blocks of a document, and a shell in which they run and print what they show."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS_PER_COMMAND = 900


def blocks(document: Path, *, begin: str = "", end: str = "") -> list[tuple[str, str]]:
    """Return the blocks of a document, or of a part of it, with their languages."""
    text = document.read_text(encoding="utf-8")
    return BLOCK.findall(text, text.index(begin), text.index(end) if end else len(text))


class Shell:
    """Runs the blocks of a document one after the other: the folder and the variables stay as each leaves them."""

    def __init__(self, folder: Path, environment: Mapping[str, str], notes: Path) -> None:
        self.folder = folder
        self._environment = dict(environment)
        self._notes = notes  # where a command leaves its variables

    def run_block(self, language: str, content: str) -> None:
        """Run the commands of a console block; write the file that a block of Python names in its first line."""
        if language == "python":
            file = self.folder / content.splitlines()[0].removeprefix("# ")
            file.parent.mkdir(exist_ok=True)
            file.write_text(content, encoding="utf-8")
        for command in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:] if language == "console" else []:
            line, *shown = command.splitlines()
            self._run(line, shown)

    def _run(self, line: str, shown: list[str]) -> None:
        bash = ["bash", "-c", f'{line} && env -0 > "{self._notes}"']
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": SECONDS_PER_COMMAND}
        done = subprocess.run(bash, cwd=self.folder, env=self._environment, check=False, **piped)
        assert done.returncode == 0, f"$ {line}\n{done.stdout}"
        assert _fits(shown, done.stdout.splitlines()), f"$ {line}\nshown: {shown}\nprinted: {done.stdout}"
        variables = self._notes.read_text().split("\0")
        self._environment = dict(variable.split("=", 1) for variable in variables if "=" in variable)
        self.folder = Path(self._environment["PWD"])


def _fits(shown: list[str], printed: list[str]) -> bool:
    """Return whether the shown lines occur in this order; within a line, ``...`` stands for anything."""
    patterns = [re.escape(" ".join(line.split())).replace(r"\.\.\.", ".*") for line in shown if line.strip() != "..."]
    lines = iter(" ".join(line.split()) for line in printed)
    return all(any(re.fullmatch(pattern, line) for line in lines) for pattern in patterns)
