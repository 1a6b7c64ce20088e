"""Private folders and files: nothing that another account has put in their place is used or followed."""

import os
import stat
from pathlib import Path

from tidegate.state_store.base.errors import PermanentError
from tidegate.state_store.base.project import account_name


def private_folder(folder: Path, *, passable: bool = False) -> Path:
    """Make a folder that only this account can enter, or restrict an existing one; return it.

    Other accounts may pass through a `passable` one to names that they know, but not list it.

    Raises: PermanentError if the folder, or the link to it, belongs to another account.
    """
    mode = 0o711 if passable else 0o700
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        check_ours(folder)
        mode &= folder.stat().st_mode  # a private one stays private
    if stat.S_IMODE(folder.stat().st_mode) != mode:
        folder.chmod(mode)
    return folder


def check_ours(path: Path) -> None:
    """Refuse a path that belongs to another account. A link may be this account's or root's; its target must be this account's.

    Raises: PermanentError, which names the owner.
    """
    for found, owners in ((path.lstat(), {os.geteuid(), 0}), (path.stat(), {os.geteuid()})):
        if found.st_uid not in owners:
            raise PermanentError(
                f"{path} belongs to user {account_name(found.st_uid)}, not to {account_name(os.geteuid())}, who runs this. "
                f"Remove it, or run this as {account_name(found.st_uid)}."
            )


def check_installed(folder: Path) -> None:
    """Refuse a folder of code that an account other than this one and root owns or could change.

    Raises: PermanentError, which names the owner.
    """
    for path in (folder.parent, folder, *folder.iterdir()):
        found = path.stat()
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & stat.S_IWOTH:
            raise PermanentError(
                f"{path} belongs to user {account_name(found.st_uid)}, and what is in it would run as "
                f"{account_name(os.geteuid())}. Remove it, or give it to this account and take the right to write from others."
            )


def private(path: str, flags: int) -> int:
    """Open a file, as the opener of `open`: a new file is private, and no link is followed."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
