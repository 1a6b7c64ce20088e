"""Plans batches of the objects that manifests name: lists which the program that writes the objects leaves beside them.

metadata = {"files": [...], "manifest": {"name", "sha256", "read", "of"}, "place": where the manifests are}

Manifests are taken in the order of their names, and objects in the order in which a manifest names them. `read` of its `of`
names have been taken or were known, so a plan begins there, unless the manifest has been written again: neither the objects
nor the manifests before are listed again.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple

from tidegate.jobs.sources.files.identity import entry_of, with_identity
from tidegate.jobs.sources.files.listing import EVERYTHING, is_young, matching_objects
from tidegate.jobs.sources.files.plan import PLACE, ObjectsCoordinator
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores import PAGE
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, describe, for_spark, url_for_spark
from tidegate.state_store.base.errors import SourceChanged, SourceUnavailable, SourceUnreadable
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

logger = logging.getLogger(__name__)

MANIFEST = "manifest"  # where metadata has how far manifests were read
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
LONGEST_NAME_BYTES = 1024  # of a key, in every store


class _Progress(NamedTuple):
    """How far a manifest was read: the digest of its content, and how many of its names."""

    name: str
    sha256: str
    read: int
    of: int


class ManifestsCoordinator(ObjectsCoordinator):
    """Plans batches from the manifests of a folder."""

    def __init__(self, source: Files, settings: Settings) -> None:
        super().__init__(source, settings)
        manifests = source.manifests_place()
        assert manifests is not None
        self._manifests = manifests
        # How far manifests are read with an object, by its name: of the objects of this page, and of those that were taken.
        self._reading: dict[str, _Progress] = {}
        self._read_at: dict[str, _Progress] = {}

    def _position(self, files: Sequence[dict[str, Any]], previous: SourceMetadata | None) -> dict[str, Any]:
        del previous
        return {MANIFEST: self._read_at[files[-1]["name"]]._asdict(), PLACE: str(self._manifests)}

    def _pages(self, previous: SourceMetadata | None) -> Iterator[Mapping[str, Any]]:
        for progress, names in self._unread(previous):
            for start in range(progress.read, len(names), PAGE):
                self._reading = {
                    name: progress._replace(read=number) for number, name in enumerate(names[start : start + PAGE], start + 1)
                }
                yield {name: self._describe_named(name, progress) for name in self._reading}

    def _identify(self, name: str) -> dict[str, Any] | None:
        if name in self._read_at:  # taken by this plan, which the history does not know yet
            return None
        entry = entry_of(self._source, self._place, name, self._page[name])
        if entry is None:
            raise self._missing(name, self._reading[name])
        self._read_at[name] = self._reading[name]
        return entry

    def _unread(self, previous: SourceMetadata | None) -> Iterator[tuple[_Progress, list[str]]]:
        """Yield each manifest that is not known to be read whole, with its names."""
        is_of_these = previous is not None and MANIFEST in previous and previous[PLACE] == str(self._manifests)
        last = _Progress(**previous[MANIFEST]) if previous and is_of_these else None
        if last is not None:
            yield self._read_manifest(last.name, last)
        for page in matching_objects(self._manifests, EVERYTHING, last.name if last else None):
            for name, listed in page.items():
                if is_young(listed.mtime_ns, self._min_age_seconds):
                    age = self._min_age_seconds
                    logger.warning("%s/%s changed less than %s s ago: not read yet.", self._manifests, name, age)
                    return  # later ones have their turn after it
                yield self._read_manifest(name, None)

    def _read_manifest(self, name: str, last: _Progress | None) -> tuple[_Progress, list[str]]:
        """Return how far a manifest was read, and its names; from its beginning, if it is another one than then.

        Raises: SourceUnreadable, SourceUnavailable; SourceChanged if it is gone before all of it was read.
        """
        path = self._manifests / name
        try:
            info = describe(path)
            if info.size > MAX_MANIFEST_BYTES:
                raise SourceUnreadable(
                    f"{path} has {info.size} bytes, and a manifest at most {MAX_MANIFEST_BYTES}: write several."
                )
            with replace(path, etag=info.etag).open() as file:
                content = file.read()
        except FileNotFoundError:
            if last and last.read == last.of:
                return last, []
            state = "of which not all names have been read" if last else "while it was read"
            raise SourceChanged(f"Manifest {path} is gone, {state}. Put it back.") from None
        digest = sha256(content).hexdigest()
        names = list(dict.fromkeys(self._name_in(path, number, line) for number, line in _lines(path, content)))
        names_read = last.read if last and last.sha256 == digest else 0
        return _Progress(name, digest, names_read, len(names)), names

    def _name_in(self, path: ObjectPath, number: int, line: str) -> str:
        """Return the name of an object below the source's place, as a manifest may have it with the place.

        Raises: SourceUnreadable.
        """
        place = f"{for_spark(self._place)}/"
        name = url_for_spark(line).removeprefix(place)
        is_none = "://" in name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/"))
        if is_none or len(name.encode(errors="surrogatepass")) > LONGEST_NAME_BYTES:
            raise SourceUnreadable(
                f"{path}, entry {number}: {line!r} is no name of an object below {self._place}. Write such names, relative to "
                "it or with it."
            )
        return name

    def _describe_named(self, name: str, progress: _Progress) -> Any:
        try:
            info = describe(self._place / name)
        except FileNotFoundError:
            raise self._missing(name, progress) from None
        except ValueError as error:
            raise SourceUnreadable(
                f"Manifest {self._manifests / progress.name} names {name!r}, which is no name of an object below "
                f"{self._place}: {error}."
            ) from error
        return with_identity(self._source, self._place / name, info) or info

    def _missing(self, name: str, progress: _Progress) -> SourceUnavailable:
        return SourceUnavailable(
            f"Manifest {self._manifests / progress.name} names {name}, and there is no {self._place / name}. Nothing new is "
            "planned until it is there; or write the manifest again without it."
        )


def _lines(path: ObjectPath, content: bytes) -> Iterator[tuple[int, str]]:
    """Yield the names in a manifest, with their numbers from 1: a name a line, or JSON with the `url` of each of its `entries`.

    Raises: SourceUnreadable.
    """
    try:
        text = content.decode("utf-8-sig")
        if not text.lstrip().startswith("{"):
            lines = (line.strip() for line in text.split("\n"))
            yield from ((number, line) for number, line in enumerate(lines, 1) if line)
            return
        for number, entry in enumerate(json.loads(text)["entries"], 1):
            yield number, "".join([entry["url"]])  # a TypeError if it is no text
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise SourceUnreadable(
            f"{path} is no manifest: {type(error).__name__} ({error}). It has a name a line, or JSON as in "
            '{"entries": [{"url": "s3://bucket/name"}]}.'
        ) from error
