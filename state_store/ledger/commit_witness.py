"""A witness outside the database: the last commit of each pipeline, to detect an older copy in its place.

A database that was restored from an archive, promoted or copied elsewhere has other identifiers than before, by which it is
noticed (`cursors.current_epoch`). A copy of the data folder, or a base backup, that is put back in its own place has the same
ones. So after each commit a mark of it is written to a file outside Postgres. Before anything is planned, processed or
committed, the database has to contain the marked commit.

A mark may be older than the last commit, because a process may die between COMMIT and writing it: that is harmless. There is a
file for each pipeline and history of commits; a history begins when a pipeline is registered, and when a person accepts a loss.
So a new database, or another project's, is not compared with the marks of an old one. None is ever removed: an old one may be
of a database that is used again.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from tidegate.state_store.base.errors import HoleDetected

logger = logging.getLogger(__name__)

VERSION = 1
MAX_BYTES = 10_000
LOCK_PATIENCE_SECONDS = 2.0


@dataclass(frozen=True)
class Mark:
    """The last known commit of a pipeline, and the database that it was in."""

    pipeline: str
    history: str
    epoch: str
    txid: int
    attempt: int
    committed_at: str

    @property
    def place(self) -> tuple[int, int]:
        """Its place in its history: txid and attempt; a redo is a later attempt at the same txid."""
        return self.txid, self.attempt


class Witness:
    """The marks in one folder. If the folder cannot be used, that is logged once, and everything else goes on."""

    def __init__(self, folder: Path, *, trusts_promotions: bool) -> None:
        """Use a folder, which need not exist yet; `trusts_promotions` is what `cursors.is_same_database` asks."""
        self.folder = folder
        self.trusts_promotions = trusts_promotions

    def file_of(self, pipeline: str, history: str) -> Path:
        """Return the file for the mark of a pipeline's history."""
        return self.folder / f"{pipeline}.{history}.json"

    def mark_of(self, pipeline: str, history: str) -> Mark | None:
        """Return the mark of a history; None if it is missing, or unreadable, which is logged.

        Raises: HoleDetected if the file is damaged.
        """
        try:
            return _read(self.file_of(pipeline, history))
        except OSError as error:
            self._report(error)
            return None

    def advance(self, mark: Mark) -> None:
        """Write a mark, unless its history has a later one.

        The file is written completely or not at all. A crash of the machine may leave the previous mark, which is harmless.

        Raises: HoleDetected if the existing file is damaged.
        """
        file = self.file_of(mark.pipeline, mark.history)
        try:
            if _is_later(_read(file), mark):
                return
            _make_private(self.folder)
            with self._lock() as is_held:
                if _is_later(_read(file), mark):
                    return
                if not is_held:
                    logger.warning("%s is not updated: %s is locked by a process that is suspended.", file, self.folder)
                    return
                _write(file, mark)
        except OSError as error:
            self._report(error)

    @contextmanager
    def _lock(self) -> Iterator[bool]:
        """Hold the folder's lock and yield True, or yield False after a while without it."""
        descriptor = os.open(self.folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            ends_at = time.monotonic() + LOCK_PATIENCE_SECONDS
            while not (is_held := _try_lock(descriptor)) and time.monotonic() < ends_at:
                time.sleep(0.01)
            yield is_held
        finally:
            os.close(descriptor)

    def _report(self, error: OSError) -> None:
        _warn(
            f"The witness folder {self.folder} cannot be used ({error.strerror}): what commits from here is not marked outside "
            "the database, so an older copy of it in its place would go unnoticed. Make the folder writable, or name another: "
            "TIDEGATE_WITNESS_FOLDER."
        )


def _is_later(known: Mark | None, mark: Mark) -> bool:
    return known is not None and known.place >= mark.place


def _read(file: Path) -> Mark | None:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as opened:
        content = opened.read(MAX_BYTES)
    try:
        values = json.loads(content)
        is_known = values.pop("version") == VERSION
        mark = Mark(**values)
        is_ours = f"{mark.pipeline}.{mark.history}.json" == file.name and all(type(number) is int for number in mark.place)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(file, str(error)) from error
    if not is_known or not is_ours:
        raise _damaged(file, "it has another version" if is_ours else "it is the mark of something else")
    return mark


def _damaged(file: Path, why: str) -> HoleDetected:
    return HoleDetected(
        f"{file}, which tells how far the pipeline had committed, is damaged: {why}. If the database is not an older copy of "
        "itself, remove this file: the next commit writes it again."
    )


def _write(file: Path, mark: Mark) -> None:
    unfinished = file.with_suffix(".unfinished")  # the writer holds the lock
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        json.dump({"version": VERSION, **asdict(mark)}, opened)
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.replace(file)


def _make_private(folder: Path) -> None:
    if not folder.is_dir():
        # The stack of root has a Postgres below this folder that runs as another account, which must be able to enter.
        for missing in reversed([place for place in folder.parents if not place.exists()]):
            missing.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@lru_cache
def _warn(message: str) -> None:
    """Log a warning once, as an error: `tidegate run` shows no other lines, and the loss would show too late."""
    logger.error("%s", message)
