"""Lists the objects of a store, by their names below a place: those that a glob takes, and reports on the others."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from tidegate.jobs.sources import LeftAlone
from tidegate.jobs.sources.files.completeness_markers import unmarked_folders
from tidegate.jobs.sources.files.file_globs import HIDDEN, Glob, GlobPosition
from tidegate.jobs.sources.files.folder_listing import NOT_REACHED
from tidegate.jobs.sources.files.stores import ObjectInfo
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, listed

FOLDER = "stands for a folder"
EVERYTHING = "**"  # the glob of all names but hidden ones
MOST_REPORTED = 10_000  # names that a report on a store looks at, because each status asks for reports


def matching_objects(place: ObjectPath, pattern: str, after: str | None = None) -> Iterator[dict[str, ObjectInfo]]:
    """Yield the objects that a glob takes, by their names below the place, in pages and in order."""
    sieve = _Sieve(pattern)
    for page in listed(place, after):
        names = {name_in(place, each): each for each in page}
        yield {name: each for name, each in names.items() if sieve.why_not(name) is None}


def names_not_matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a glob does not take."""
    sieve = _Sieve(pattern)
    return [name for name in names if sieve.why_not(name) is not None]


def left_alone(place: ObjectPath, pattern: str) -> LeftAlone:
    """Return which of the first MOST_REPORTED names are not read, by reason."""
    sieve, matching = _Sieve(pattern), 0
    names: dict[str, list[str]] = defaultdict(list)
    objects = (each for page in listed(place) for each in page)
    for each in islice(objects, MOST_REPORTED):
        name = name_in(place, each)
        reason = sieve.why_not(name)
        if reason is None:
            matching += 1
        else:
            names[reason].append(name)
    where = str(place) if next(objects, None) is None else f"{place} (its first {MOST_REPORTED} names)"
    return LeftAlone(where, pattern, matching, dict(sorted(names.items())))


def young_objects(place: ObjectPath, pattern: str, min_age_seconds: int) -> list[str]:
    """Return which of the first MOST_REPORTED names changed less than `min_age_seconds` ago."""
    if min_age_seconds <= 0:
        return []
    since = (time.time() - min_age_seconds) * 10**9
    objects = (item for page in matching_objects(place, pattern) for item in page.items())
    return [name for name, info in islice(objects, MOST_REPORTED) if info.mtime_ns > since]


def folders_without_marker(place: ObjectPath, pattern: str, marker: str) -> list[str]:
    """Return the folders that are not complete, among the first MOST_REPORTED names."""
    sieve = _Sieve(pattern)
    names = (name_in(place, each) for page in listed(place) for each in page)
    of_files = [
        name for name in islice(names, MOST_REPORTED) if name.rpartition("/")[2] == marker or sieve.why_not(name) is None
    ]
    last = of_files[-1] if next(names, None) is not None and of_files else None  # its folder's marker may be further on
    return [folder for folder in unmarked_folders(of_files, marker) if last is None or not last.startswith(f"{folder}/")]


class _Sieve:
    """Compares names with a glob, folder by folder; neighbours in a listing share their folders."""

    def __init__(self, pattern: str) -> None:
        self._glob = Glob(pattern)
        self._folder = ""
        self._places = self._glob.start()
        self._why: str | None = None

    def why_not(self, name: str) -> str | None:
        """Return why the glob does not take a name; None if it does."""
        folder, _, last = name.rpartition("/")
        if folder != self._folder:
            self._enter(folder)
        if self._why is not None:
            return self._why
        if not last:
            return FOLDER
        return None if self._glob.takes(self._places, last) else self._glob.why_not(self._places, last)

    def _enter(self, folder: str) -> None:
        self._folder, self._places, self._why = folder, self._glob.start(), None
        for part in folder.split("/") if folder else ():
            inside: frozenset[GlobPosition] = self._glob.below(self._places, part)
            if not inside:
                self._why = HIDDEN if self._glob.below(self._places, part, strict=False) else NOT_REACHED
                return
            self._places = inside


def name_in(place: ObjectPath, info: ObjectInfo) -> str:
    """Return an object's name below a place."""
    return info.key[len(place.key) + 1 :] if place.key else info.key
