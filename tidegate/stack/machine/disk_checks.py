"""Checks of disk and machine for `up` and `down`, with advice when something is missing."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tidegate.stack.machine.private_files import private_folder
from tidegate.state_store.base.errors import PermanentError, RetryableError

PROBE_BYTES = 1024 * 1024
ADVICE = {
    errno.ENOSPC: "Make room there (`df` and `df -i` tell how much there is); what runs goes on by itself then.",
    errno.EDQUOT: "Make room there; what runs goes on by itself then.",
    errno.EMFILE: "Raise this shell's limit on open files: ulimit -n 4096",
    errno.ENFILE: "The machine has too many files open; try again when it has fewer.",
    errno.ENOMEM: "The machine has no memory left; try again when it has.",
    errno.EAGAIN: "This user may not start more processes: see ulimit -u.",
}


class MachineRefuses(RetryableError):
    """The machine has no room, files, memory or processes left; nothing is lost."""


class NotPermitted(PermanentError):
    """A file of the stack can neither be read nor written by this user."""


def check_room(*folders: Path) -> None:
    """Make folders and check that something can be written into each.

    Raises: OSError, which names the folder.
    """
    for folder in folders:
        if not folder.exists():
            private_folder(folder)
        try:
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(os.urandom(PROBE_BYTES))  # no file system can compress it away
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder)) from error


@contextlib.contextmanager
def named(folder: Path) -> Iterator[None]:
    """Turn an OSError into one that names the file and says what to do; `folder` is the stack's.

    Raises: MachineRefuses, NotPermitted.
    """
    try:
        yield
    except OSError as error:
        what = f"{error.filename or folder}: {error.strerror or error}."
        if error.errno in ADVICE:
            raise MachineRefuses(f"{what} {ADVICE[error.errno]}") from error
        raise NotPermitted(
            f"{what} A stack keeps everything in {folder}: let this user read and write there, or name another project folder "
            "by TIDEGATE_HOME."
        ) from error
