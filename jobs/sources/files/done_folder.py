"""The done folder keeps the files of committed batches, in a folder per txid."""

import errno
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.jobs.sources.files.content import digest_of, is_below, open_file, stamp_of
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable

COPY = ".{}.part"  # the name of a file while it is copied from another file system
# The name, in the source, of a file whose copy is whole, until it is removed; what took the file's own name is not removed.
ASIDE = ".{sha256}.{txid}.part"


@dataclass(frozen=True)
class DoneFolder:
    """A source's folder and its done folder."""

    source: Path
    done: Path

    def path(self, txid: int, name: str) -> Path:
        """Return the path of a batch's file after its move."""
        return self.done / str(txid) / name

    def has(self, txid: int, name: str) -> bool:
        """Return whether a file of a batch has been moved."""
        return self.path(txid, name).exists()

    def is_off(self, device: int) -> bool:
        """Return whether files that come from this device leave it, so that their inodes there are free for others."""
        return self.done.stat().st_dev != device

    def check_writable(self) -> None:
        """Refuse to plan files that could not be moved away after their commit, or would be read again where they went.

        Raises: SourceUnreadable.
        """
        if is_below(os.path.realpath(self.done), os.path.realpath(self.source)):
            raise SourceUnreadable(
                f"Files of {self.source} cannot be moved to {self.done}, which is inside it: they would be read again. Declare "
                "a done_folder outside it."
            )
        try:
            self.done.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._not_movable(self.done, error.strerror) from error
        for folder in (self.source, self.done):
            if not os.access(folder, os.W_OK | os.X_OK):
                raise self._not_movable(folder, "it cannot be written")

    def _not_movable(self, where: Path, reason: str | None) -> SourceUnreadable:
        return SourceUnreadable(
            f"Files of {self.source} could not be moved to {self.done} when they have counted: {where}: {reason}. Make both "
            "writable for the account that plans and commits, or declare no done_folder."
        )

    def txids(self) -> list[int]:
        """Return the txids that have a folder."""
        with os.scandir(self.done) as entries:
            return [int(entry.name) for entry in entries if entry.name.isascii() and entry.name.isdigit()]

    def has_files(self, txid: int) -> bool:
        """Return whether the folder of a txid has a file."""
        return any(files for _, _, files in os.walk(self.done / str(txid)))

    def move(self, txid: int, file: Mapping[str, Any]) -> None:
        """Move a file that has counted away, unless it was moved before or is gone; of a link, move a copy of the content.

        A file in the done folder is never overwritten, and only the content that counted is moved, or removed. If the process
        dies, the file is in one of the two places, or in both with the same content.

        Raises: SourceChanged, SourceUnreadable.
        """
        source, target = self.source / file["name"], self.path(txid, file["name"])
        aside = source.with_name(ASIDE.format(sha256=file["sha256"], txid=txid))
        try:
            if not target.exists():
                before = source.stat()
                if not _is_same(source, before, file):
                    raise SourceChanged(
                        f"{source} has changed since it counted in txid {txid}, so it is not moved to {target}. Put back what "
                        "counted, and give what is new another name."
                    )
                target.parent.mkdir(parents=True, exist_ok=True)
                if not source.is_symlink() and _is_renamed(source, target, before):
                    return
                _copy(source, target, before)
                source.rename(aside)
            if not _is_same(aside, aside.stat(), file):
                raise _put_back(aside, source)
            aside.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._not_movable(source, error.strerror) from error


def _is_same(path: Path, status: os.stat_result, file: Mapping[str, Any]) -> bool:
    """Return whether a file has its planned content. It is read only if its stamp differs."""
    if status.st_size != file["size"]:
        return False
    if stamp_of(status).is_of(file):
        return True
    with open_file(path) as content:
        return bool(digest_of(content) == file["sha256"])


def _put_back(taken: Path, source: Path) -> SourceChanged:
    """Give a file that took the name of a moved one its name back, unless another has it by now; return the error."""
    if source.exists():
        return SourceChanged(f"{source} was replaced twice while it was being moved: {taken} has not counted. Move it away.")
    taken.rename(source)
    return _replaced(source)


def _replaced(source: Path) -> SourceChanged:
    return SourceChanged(f"{source} was replaced while it was being moved to the done folder.")


def _is_renamed(source: Path, target: Path, before: os.stat_result) -> bool:
    """Move a file atomically, if it stays as before; return False if the target is on another file system."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    after = target.lstat()
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise _put_back(target, source)  # another file took the name between check and move
    return True


def _copy(source: Path, target: Path, before: os.stat_result) -> None:
    """Copy a file, with its times and rights as far as the other place keeps these, if it stays as before.

    The target is whole or absent.
    """
    copy = target.with_name(COPY.format(target.name))
    shutil.copyfile(source, copy)
    with suppress(OSError):
        shutil.copystat(source, copy)
    if stamp_of(source.stat()) != stamp_of(before):
        raise _replaced(source)
    copy.replace(target)
