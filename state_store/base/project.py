"""The project folder: where a team's settings, data, pipelines, Dags and migrations are.

The folder is the one that ``TIDEGATE_HOME`` names, or the nearest one upwards that has ``tidegate.toml`` or ``.tidegate``. Its
``pipelines`` are those that there are, its ``dags`` those that the stack runs, and its ``migrations`` those of its states. A
folder without ``pipelines`` only holds settings, for programs that read states. What another account could have put there is
not read.
"""

import grp
import logging
import os
import pwd
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal

from tidegate.state_store.base.errors import SettingsInvalid

logger = logging.getLogger(__name__)

HOME_VARIABLE = "TIDEGATE_HOME"
FOUND_VARIABLE = "TIDEGATE_HOME_WAS_FOUND"  # a stack names its folder to its processes, and by this that no person has named it
SETTINGS_FILE = "tidegate.toml"
STACK_FOLDER = ".tidegate"
Part = Literal["pipelines", "dags", "migrations"]


def find(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the project folder; None if the current folder is in none."""
    if named := environ.get(HOME_VARIABLE):
        return Path(named).resolve()
    here = Path.cwd()
    for folder in (here, *here.parents):
        found = [folder / SETTINGS_FILE] if (folder / SETTINGS_FILE).is_file() else []
        found += [folder / STACK_FOLDER] if (folder / STACK_FOLDER).is_dir() else []
        if any(map(is_trusted, found)):
            return folder.resolve()
    return None


def is_named(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a person has named the project folder: what is in it is that person's own choice."""
    return bool(environ.get(HOME_VARIABLE)) and not environ.get(FOUND_VARIABLE)


def own(part: Part) -> Path | None:
    """Return a folder, which need not exist, of the project that `find` returns; None if that has no pipelines.

    Raises: SettingsInvalid if another account could have written it: what is in it is run.
    """
    home = find()
    if home is None or not (home / "pipelines").is_dir():
        return None
    return folder_of(home, part)


def folder_of(home: Path, part: Part) -> Path:
    """Return a folder, which need not exist, of a project.

    Raises: SettingsInvalid if another account could have written it: what is in it is run.
    """
    folder = home / part
    if not is_named() and folder.is_dir():
        places = [folder, *folder.rglob("*")]
        linked = [place.resolve() for place in places[1:] if place.is_symlink() and place.is_dir()]
        for place in [*places, *(place for target in linked for place in target.rglob("*"))]:
            is_code = place.is_dir() or (place.suffix in (".py", ".pyc", ".so") and place.is_file())
            if is_code and (reason := _distrust_of(place)):
                raise SettingsInvalid(
                    f"{str(place)!r} {reason}, so its code is not run. Take that right away (chmod go-w), or, to run "
                    f"it all the same: export {HOME_VARIABLE}={str(home)!r}"
                )
    return folder


def is_trusted(path: Path) -> bool:
    """Return whether no other account can have written this path or put it here; warn if one can."""
    for place in [path.parent, path] if path.parent.name == STACK_FOLDER else [path]:
        try:
            reason = _distrust_of(place)
        except OSError:
            return True  # it is missing, or reading it will show why it cannot be read
        if reason:
            warn(
                f"{str(place)!r} {reason}, so it is ignored. To use it all the same: "
                f"export {HOME_VARIABLE}={str(place.parent)!r}"
            )
            return False
    return True


def account_name(user: int) -> str:
    """Return the name of an account of this machine, or its number if it has none."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _distrust_of(path: Path) -> str | None:
    """Return why a path is not trusted: another account owns it or may write to it; None if it is trusted."""
    return _distrust(path.lstat()) or _distrust(path.stat())


def _distrust(found: os.stat_result) -> str | None:
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {account_name(found.st_uid)}"
    if stat.S_ISLNK(found.st_mode):
        return None
    if found.st_mode & stat.S_IWOTH:
        return "can be written by every account"
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid):
        return f"can be written by group {found.st_gid}"
    return None


def _is_private_group(group: int) -> bool:
    """Return whether this account is a group's only member: many systems give each account such a group."""
    try:
        account, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return group == 0
    return (group == 0 or found.gr_name == account) and set(found.gr_mem) <= {account}


@lru_cache
def warn(message: str) -> None:
    """Log a warning once."""
    logger.warning("%s", message)
