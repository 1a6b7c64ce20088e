"""A small disk of its own, which a test fills."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def mounted(size: str) -> Iterator[Path]:
    """Mount a disk of this size, such as "240m", on a folder that every account reaches."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-disk-"))
    folder.chmod(0o755)
    options = f"size={size},mode=0755"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=False, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("a disk of its own needs the right to mount one: run the tests as root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
        folder.rmdir()


def fill(disk: Path) -> Path:
    """Fill a disk to its last block; return the file that takes the room."""
    ballast = disk / "ballast"
    for size in (1024 * 1024, 512):
        with suppress(OSError), ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(size))
    return ballast
