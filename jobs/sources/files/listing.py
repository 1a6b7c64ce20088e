"""Lists a source's files, in a folder or in a store: the names that its glob takes, in order, and the others.

Nothing is left out silently: every name that is not read is listed with its reason. Other programs write into a source folder,
so its links are followed only within it, unless the source declares follow_links.
"""

import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tidegate.jobs.sources import LeftAlone
from tidegate.jobs.sources.files.completeness_markers import unmarked_folders
from tidegate.jobs.sources.files.content import is_below
from tidegate.jobs.sources.files.file_globs import Glob, GlobPosition
from tidegate.jobs.sources.files.stores import ObjectInfo
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, Place, listed
from tidegate.jobs.sources.files.unfinished_files import HIDDEN
from tidegate.state_store.base.errors import SettingsInvalid, SourceUnreadable

NOT_REACHED = "is a folder that the glob does not lead into"
SAME_FOLDER = "is a link to a folder that is read by another name"
SAME_FILE = "is a link to a file that is read by another name"
FOLDER = "stands for a folder"
EVERYTHING = "**"  # the glob of all names but hidden ones
MOST_WAIT_SECONDS = 10  # of a plan that finds only young files, until they are old enough
AHEAD_SECONDS = 1800  # less than a wrong time zone, or a change of clocks, puts a time ahead
MOST_REPORTED = 10_000  # names that a report on a store looks at, because each status asks for reports


@dataclass
class Listing:
    """The names to read, in order, and the names left alone, by reason; folders end with a slash.

    In a store, only the first MOST_REPORTED names are looked at: `last` is the last of these, if there are more.
    """

    place: Place
    pattern: str
    names: list[str] = field(default_factory=list)
    left_alone: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    objects: dict[str, ObjectInfo] = field(default_factory=dict)  # those to read, in a store
    last: str | None = None

    def report(self) -> LeftAlone:
        """Return the listing as a report for operators."""
        where = str(self.place) if self.last is None else f"{self.place} (its first {MOST_REPORTED} names)"
        left_alone = {reason: sorted(names) for reason, names in sorted(self.left_alone.items())}
        return LeftAlone(where, self.pattern, len(self.names), left_alone)

    def young(self, min_age_seconds: int) -> list[str]:
        """Return the files that may still be written, by their age."""
        if isinstance(self.place, ObjectPath):
            return [name for name, info in self.objects.items() if is_young(info.mtime_ns, min_age_seconds)]
        return young_files(self.place, self.names, min_age_seconds)

    def unmarked(self, marker: str) -> list[str]:
        """Return the folders with files that no marker completes, in order."""
        marked = [name for names in self.left_alone.values() for name in names if name.rpartition("/")[2] == marker]
        folders = unmarked_folders([*self.names, *marked], marker)
        # The last folder's marker may be further on.
        return [folder for folder in folders if self.last is None or not self.last.startswith(f"{folder}/")]


def list_files(folder: Path, pattern: str, *, follow_links: bool = False) -> Listing:
    """List the files to read, relative to the folder and in order, and the names left alone.

    A link that leads out of the folder is among the names; `file_identity` refuses it when a batch would take it.

    Raises: SourceUnreadable if the folder, or one in it that the glob leads into, does not exist or cannot be listed;
    SettingsInvalid for names that are not ASCII in a process whose locale is not of UTF-8.
    """
    if not folder.is_dir():
        raise SourceUnreadable(f"The source folder {folder} does not exist. Create it, or correct the pipeline's Files(...).")
    return _Walk(folder, Glob(pattern), Listing(folder, pattern), follow_links=follow_links).run()


class _Walk:
    """One walk through a folder, as far as the glob leads."""

    def __init__(self, folder: Path, glob: Glob, listing: Listing, *, follow_links: bool) -> None:
        self.glob = glob
        self._folder = folder
        self._real = os.path.realpath(folder)
        self._found = listing
        self._follow_links = follow_links
        # The real path of each file that is reached by a link.
        self._linked: dict[str, str] = {}
        self._entered: set[tuple[str, frozenset[GlobPosition]]] = set()
        # Arguments of `_list` for folders still to be listed: they may be nested deeper than recursion goes.
        self._ahead: deque[tuple[str, frozenset[GlobPosition], tuple[str, ...], bool]] = deque()

    def run(self) -> Listing:
        """Return the listing. A file that is reached by several names keeps one: its own name if the glob takes it."""
        self._ahead.append(("", self.glob.start(), (self._real,), False))
        while self._ahead:
            self._list(*self._ahead.popleft())
        names = set(self._found.names)
        name_of: dict[str, str] = {}
        for name, real in sorted(self._linked.items()):
            own = os.path.relpath(real, self._real)
            if (own in names and own not in self._linked) or name_of.setdefault(real, name) != name:
                names.discard(name)
                self._found.left_alone[SAME_FILE].append(name)
        self._found.names = sorted(names)
        _check_encoding(self._found)
        return self._found

    def _list(self, below: str, places: frozenset[GlobPosition], above: tuple[str, ...], by_link: bool) -> None:
        """List one folder. `below` is its name with a slash, `above` the real paths of it and of the folders above it."""
        path = self._folder / below
        try:
            with os.scandir(path) as entries:
                children = sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:
            if below:
                return  # it was removed during the walk
            raise SourceUnreadable(f"The source folder {path} was removed while it was listed.") from None
        except OSError as error:
            raise SourceUnreadable(
                f"{'A folder in the' if below else 'The'} source folder {printable(path)} cannot be listed: {error.strerror}. "
                "Make it readable, or move it away."
            ) from error
        for entry in children:
            name = below + entry.name
            if _is_folder(entry):
                self._visit_folder(entry, name, places, above, by_link=by_link)
            elif not self.glob.takes(places, entry.name):
                self._found.left_alone[self.glob.why_not(places, entry.name)].append(name)
            else:
                self._found.names.append(name)
                if entry.is_symlink():
                    self._linked[name] = os.path.realpath(entry.path)
                elif by_link:
                    self._linked[name] = f"{above[-1]}/{entry.name}"

    def _visit_folder(
        self, entry: "os.DirEntry[str]", name: str, places: frozenset[GlobPosition], above: tuple[str, ...], *, by_link: bool
    ) -> None:
        inside = self.glob.below(places, entry.name)
        if not inside and self.glob.takes(places, entry.name):
            self._found.names.append(name)  # a folder that the glob takes: refused when a batch would take it
        elif not inside:
            is_hidden = bool(self.glob.below(places, entry.name, strict=False))
            self._found.left_alone[HIDDEN if is_hidden else NOT_REACHED].append(f"{name}/")
        elif not entry.is_symlink():
            self._ahead.append((f"{name}/", inside, (*above, f"{above[-1]}/{entry.name}"), by_link))
        else:
            self._follow(name, inside, above, os.path.realpath(entry.path))

    def _follow(self, name: str, inside: frozenset[GlobPosition], above: tuple[str, ...], real: str) -> None:
        """Enter a linked folder, unless the link leads in circles or out of the source."""
        if not self._follow_links and not is_below(real, self._real):
            self._found.names.append(name)  # refused when a batch would take it
        elif real in above or (real, inside) in self._entered:
            self._found.left_alone[SAME_FOLDER].append(f"{name}/")
        else:
            self._entered.add((real, inside))
            self._ahead.append((f"{name}/", inside, (*above, real), True))


def _check_encoding(listing: Listing) -> None:
    """Refuse names that another process would read as others, because its locale is another: each file would count twice."""
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and (name := next((name for name in listing.names if not name.isascii()), None)):
        raise SettingsInvalid(
            f"{listing.place} has names that are not ASCII, such as {name}, and this process takes them for {encoding}, as "
            "its locale says: to others they are other names. Let it have a locale of UTF-8 (LC_ALL=C.UTF-8), or set "
            "PYTHONUTF8=1."
        )


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # such as a link to itself, which is refused on opening


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


def first_objects(place: ObjectPath, pattern: str) -> Listing:
    """Return the listing of the first MOST_REPORTED names of a store.

    Raises: SourceUnreadable, SourceUnavailable.
    """
    sieve, listing = _Sieve(pattern), Listing(place, pattern)
    objects, name = (each for page in listed(place) for each in page), None
    for each in islice(objects, MOST_REPORTED):
        name = name_in(place, each)
        if reason := sieve.why_not(name):
            listing.left_alone[reason].append(name)
        else:
            listing.names.append(name)
            listing.objects[name] = each
    listing.last = None if next(objects, None) is None else name
    return listing


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


def is_young(mtime_ns: int, min_age_seconds: int) -> bool:
    """Return whether a file or an object may still be written, by its age.

    A clock of its server may be ahead by AHEAD_SECONDS; a time further in the future is no sign of that.
    """
    age = time.time() - mtime_ns / 10**9
    return min_age_seconds > 0 and -max(AHEAD_SECONDS, min_age_seconds) < age < min_age_seconds


def young_files(folder: Path, names: Iterable[str], min_age_seconds: int) -> list[str]:
    """Return the files that may still be written, by their age; vanished files are left out."""
    young = []
    for name in names if min_age_seconds > 0 else ():
        with suppress(OSError):
            if is_young((folder / name).stat().st_mtime_ns, min_age_seconds):
                young.append(name)
    return young


def printable(path: Path) -> str:
    """Return a path as printable, storable text, even if its bytes are not UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")
