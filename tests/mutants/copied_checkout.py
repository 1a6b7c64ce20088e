"""A copy of this checkout to plant faults in, with a Python environment whose `tidegate` is the copy's in every process."""

import os
import site
import subprocess
import sys
from itertools import count
from pathlib import Path

from tests.checkout import copy_to

_seconds = count(1)


class CopiedCheckout:
    """The copy: its folder and its Python."""

    def __init__(self, folder: Path) -> None:
        """Copy what is in Git, links included, and make the environment.

        The environment has this one's packages by a path, so that no file of theirs leads to this checkout: what `pip` has
        installed for editing is found by a `.pth` file, and those are read in the environment's own folder only.
        """
        self.folder = copy_to(folder, "")
        self.python = folder / ".venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
        (packages,) = (folder / ".venv" / "lib").glob("python3*/site-packages")
        (packages / "copy.pth").write_text(f"{folder}\n{site.getsitepackages()[0]}\n")
        self._copy_commands()

    def _copy_commands(self) -> None:
        """Copy the commands of this environment, such as `tidegate`, for the copy's Python."""
        for command in Path(sys.executable).parent.iterdir():
            made = self.python.with_name(command.name)
            if made.exists() or not command.is_file() or command.is_symlink():
                continue
            content = command.read_bytes()
            if content.startswith(b"#!"):
                made.write_bytes(content.replace(os.fsencode(command.parent), os.fsencode(self.python.parent), 1))
                made.chmod(0o755)

    def check(self) -> None:
        """Check that a process of the copy's Python, wherever it runs, has the copy's code."""
        program = "import tidegate, tidegate.state_store.store as s; print(tidegate.__file__, s.__file__)"
        found = subprocess.run([self.python, "-c", program], cwd="/", capture_output=True, text=True, check=True).stdout.split()
        assert all(Path(file).resolve().is_relative_to(self.folder) for file in found), found

    def write(self, name: str, text: str) -> None:
        """Write a file, with a time of its own: Python takes bytecode of the same second and size for that of the file."""
        file = self.folder / name
        file.write_text(text)
        moment = 1_000_000_000 + next(_seconds)
        os.utime(file, (moment, moment))
