"""Markers: a file, such as _SUCCESS, by which the program that writes a folder says that the folder is complete.

A file is complete if there is a marker in its folder, or in a folder above it, below the source's own; a file that is in the
source's own folder needs the marker there.
"""

from collections.abc import Iterable, Iterator

from jobs.sources.files.objects import ObjectPath, Place, look
from state_store.errors import SourceUnreadable


class Markers:
    """Which folders of a source are marked, looked up once each; without the name of a marker, all are."""

    def __init__(self, place: Place, marker: str | None) -> None:
        self._place, self._marker = place, marker
        self._marked: dict[str, bool] = {}

    def awaited(self, name: str) -> str | None:
        """Return the folder of a file that is not complete; None if it is.

        Raises: SourceUnreadable, SourceUnavailable.
        """
        folder = name.rpartition("/")[0]
        if self._marker is None or any(self._is_marked(each) for each in _at_and_above(folder)):
            return None
        return folder or "."

    def unmarked(self, names: Iterable[str]) -> list[str]:
        """Return the folders of files that are not complete, in order.

        Raises: SourceUnreadable, SourceUnavailable.
        """
        return sorted({folder for name in names if (folder := self.awaited(name))})

    def _is_marked(self, folder: str) -> bool:
        if folder not in self._marked:
            self._marked[folder] = self._exists(f"{folder}/{self._marker}" if folder else f"{self._marker}")
        return self._marked[folder]

    def _exists(self, name: str) -> bool:
        path = self._place / name
        if not isinstance(path, ObjectPath):
            try:
                return path.is_file()
            except OSError as error:
                raise SourceUnreadable(f"{path} cannot be looked up: {error.strerror}. Make its folder readable.") from error
        try:
            look(path)
        except FileNotFoundError:
            return False
        return True


def unmarked_in(names: Iterable[str], marker: str) -> list[str]:
    """Return the folders with files that no marker among the same names completes, in order."""
    folders: set[str] = set()
    marked: set[str] = set()
    for name in names:
        folder, _, last = name.rpartition("/")
        (marked if last == marker else folders).add(folder)
    return sorted(folder or "." for folder in folders if marked.isdisjoint(_at_and_above(folder)))


def _at_and_above(folder: str) -> Iterator[str]:
    """Yield a folder and those above it, below the source's own; for a file in that, the source's own."""
    yield folder
    while "/" in folder:
        folder = folder.rpartition("/")[0]
        yield folder
