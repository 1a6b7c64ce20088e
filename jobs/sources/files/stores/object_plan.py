"""Plans batches of objects, from a listing that is read page by page and no further than batches need.

An object that was overwritten after it counted stops planning when the listing comes to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidegate.jobs.sources.files.plan import PLACE, FilesCoordinator
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores import ObjectInfo
from tidegate.jobs.sources.files.stores.object_identity import entry_of, identity_of, is_too_young, with_identity
from tidegate.jobs.sources.files.stores.object_listing import matching_objects
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, describe
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.ledger.counted_files import AFTER, TakenFile


class ObjectsCoordinator(FilesCoordinator):
    """Plans batches of the objects that a glob takes."""

    _place: ObjectPath

    def __init__(self, source: Files, place: ObjectPath, *, min_age_seconds: int) -> None:
        super().__init__(source, place, str(place), min_age_seconds)
        self._page: Mapping[str, ObjectInfo] = {}  # the part of the listing that is compared, by name

    def _position(self, files: Sequence[dict[str, Any]], previous: SourceMetadata | None) -> dict[str, Any]:
        if not self._source.names_grow:
            return super()._position(files, previous)
        return {AFTER: files[-1]["name"] if files else self._last_name(previous), PLACE: self._place_name}

    def _find_new(self, txid: int, previous: SourceMetadata | None) -> Iterator[dict[str, Any]]:
        after = self._last_name(previous) if self._source.names_grow else None
        for page in matching_objects(self._place, self._source.glob, after):
            self._page = page
            for name in self._untaken(list(self._page), txid, previous):
                info, is_held_back = self._examine(name)
                entry = entry_of(self._source, self._place, name, info) if info and not is_held_back else None
                if entry:
                    yield entry
                elif self._source.names_grow and (is_held_back or page[name].size):
                    # A later name would pass it. If it is gone, it may be replaced just now; an empty one stands for a folder.
                    return

    def _examine(self, name: str) -> tuple[ObjectInfo | None, bool]:
        """Return an object with its ETag, None if it is gone; and whether it is left to a later plan."""
        if not self._is_marked(name):
            return None, True
        info = with_identity(self._source, self._place / name, self._page[name])
        is_young = info is not None and is_too_young(info, self._min_age_seconds)
        self._young += [name] if is_young else []
        return info, is_young

    def _find_same(self, name: str, earlier: Sequence[TakenFile]) -> tuple[TakenFile | None, Mapping[str, Any]]:
        """Find it by its ETag; if the listing tells none, an object of the same time is the same, and another one is read."""
        listed = self._page.get(name) or describe(self._place / name)
        candidates = [file for file in earlier if file.size == listed.size]
        if not candidates:
            return None, {}
        if listed.identity is not None:
            return next((file for file in candidates if file.sha256 == listed.identity), None), {}
        if same := next((file for file in candidates if file.mtime_ns == listed.mtime_ns), None):
            return same, {}
        if (entry := identity_of(self._source, self._place, name)) is None:
            raise FileNotFoundError(name)
        return next((file for file in candidates if file.sha256 == entry["sha256"]), None), {"mtime_ns": listed.mtime_ns}

    def _last_name(self, previous: SourceMetadata | None) -> str | None:
        """Return the last name that batches have taken from this place, in the order of names."""
        if previous is None or previous.get(PLACE, self._place_name) != self._place_name:
            return None
        if AFTER in previous:
            return previous[AFTER]  # type: ignore[no-any-return]
        return previous["files"][-1]["name"] if previous["files"] else None
