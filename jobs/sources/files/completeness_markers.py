"""Markers: a file, such as _SUCCESS, by which the program that writes a folder says that the folder is complete.

A file is complete if there is a marker in its folder, or in a folder above it, below the source's own; a file that is in the
source's own folder needs the marker there.
"""

import stat
from collections.abc import Iterable, Iterator

from tidegate.jobs.sources.files.content import Stamp, stamp_of
from tidegate.jobs.sources.files.stores import ObjectInfo
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, Place, describe
from tidegate.state_store.base.errors import SourceUnavailable, SourceUnreadable

# What tells a marker from one that was written later: an object's description; a file's stamp.
Written = ObjectInfo | Stamp


class Markers:
    """Which folders of a source are marked, looked up once each; without the name of a marker, all are."""

    def __init__(self, place: Place, marker: str | None) -> None:
        self._place, self._marker = place, marker
        self._marked: dict[str, Written | None] = {}

    def unmarked_folder(self, name: str) -> str | None:
        """Return the folder of a file that is not complete; None if it is.

        Raises: SourceUnreadable, SourceUnavailable.
        """
        folder = name.rpartition("/")[0]
        if self._marker is None or any(self._is_marked(each) for each in _with_parents(folder)):
            return None
        return folder or "."

    def check_unchanged(self, names: Iterable[str]) -> None:
        """Check that the folders of files are still complete, and by the same markers as when they were first looked up.

        Raises: SourceUnavailable if the program that writes a folder has begun again; SourceUnreadable.
        """
        if self._marker is None:
            return
        for folder in dict.fromkeys(name.rpartition("/")[0] for name in names):
            marked = next((each for each in _with_parents(folder) if self._marked.get(each) is not None), None)
            if marked is not None and self._find(marked) != self._marked[marked]:
                raise SourceUnavailable(
                    f"{self._place / marked if marked else self._place} lost its {self._marker}, or got another one, while its "
                    "files were planned: it is written again. They are planned once it is complete."
                )

    def _is_marked(self, folder: str) -> bool:
        if folder not in self._marked:
            self._marked[folder] = self._find(folder)
        return self._marked[folder] is not None

    def _find(self, folder: str) -> Written | None:
        """Return what a folder's marker is at present; None if there is none."""
        path = self._place / (f"{folder}/{self._marker}" if folder else f"{self._marker}")
        try:
            if isinstance(path, ObjectPath):
                return describe(path)
            status = path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceUnreadable(f"{path} cannot be looked up: {error.strerror}. Make its folder readable.") from error
        return stamp_of(status) if stat.S_ISREG(status.st_mode) else None


def unmarked_folders(names: Iterable[str], marker: str) -> list[str]:
    """Return the folders with files that no marker among the same names completes, in order."""
    folders: set[str] = set()
    marked: set[str] = set()
    for name in names:
        folder, _, last = name.rpartition("/")
        (marked if last == marker else folders).add(folder)
    return sorted(folder or "." for folder in folders if marked.isdisjoint(_with_parents(folder)))


def _with_parents(folder: str) -> Iterator[str]:
    """Yield a folder and those above it, below the source's own; for a file in that, the source's own."""
    yield folder
    while "/" in folder:
        folder = folder.rpartition("/")[0]
        yield folder
