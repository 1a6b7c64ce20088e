"""Plans batches of the files in a folder, which is listed whole; a file is read for its digest when a batch takes it."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidegate.jobs.sources.files.content import digest_of, grown_from, open_file, stamp_of
from tidegate.jobs.sources.files.folder_listing import NOT_UTF8, is_young
from tidegate.jobs.sources.files.plan import FilesCoordinator, first_names
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores.object_identity import file_identity
from tidegate.state_store.base.errors import HoleDetected, SourceUnreadable
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.ledger.counted_files import TakenFile

logger = logging.getLogger(__name__)

# A plan that finds only young files waits until they are old enough, if that takes no longer than this.
LONGEST_WAIT_SECONDS = 10


class FolderCoordinator(FilesCoordinator):
    """Plans batches from one listing of the folder."""

    _place: Path

    def __init__(self, source: Files, settings: Settings) -> None:
        """List the folder.

        Raises: SourceUnreadable if it does not exist or cannot be listed.
        """
        listing = source.listing(settings)
        if message := listing.report().sentence():
            logger.info("%s", message)
        super().__init__(source, listing.folder, source.folder, source.min_age(settings))
        self._names = listing.names
        self._within = None if source.follow_links else listing.folder
        self._done = source.done(settings.home)
        if self._done:
            self._done.check_writable()

    def _find_new(self, txid: int, previous: SourceMetadata | None) -> Iterator[dict[str, Any]]:
        self._check_done_folder()
        unstorable = [name for name in self._names if NOT_UTF8.search(name)]  # refused when a batch would take them
        names = [name for name in self._names if not NOT_UTF8.search(name)] if unstorable else self._names
        return self._identified([*unstorable, *self._untaken(names, txid, previous)])

    def _identified(self, names: Iterable[str]) -> Iterator[dict[str, Any]]:
        for name in names:
            if not self._is_marked(name):
                continue
            identity = file_identity(self._source, self._place, name, self._min_age_seconds)
            if identity is None:
                self._young.append(name)
            else:
                yield identity

    def _find_same(self, name: str, earlier: Sequence[TakenFile]) -> tuple[TakenFile | None, Mapping[str, Any]]:
        """Find it by its stamp; read the present file only if that does not decide.

        It does not if the taken file was moved away: the present file was put there later.
        """
        path = self._place / name
        try:
            stamp = stamp_of(path.stat())
            for file in earlier:
                if file.stamp == stamp and not file.is_done:
                    return file, {}
            candidates = [file for file in earlier if file.size == stamp.size]
            if not candidates:
                return None, {}
            with open_file(path, self._within) as content:
                digest = digest_of(content)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SourceUnreadable(f"{path} cannot be read: {error.strerror}.") from error
        return next((file for file in candidates if file.sha256 == digest), None), stamp._asdict()

    def _has_grown(self, file: TakenFile) -> bool:
        return grown_from(self._place / file.name, file.size, file.sha256, within=self._within)

    def _check_done_folder(self) -> None:
        """Refuse to plan if files of uncommitted batches were moved away: the ledger has then lost their commits.

        Raises: HoleDetected.
        """
        if self._done is None or self._history is None:
            return
        txids = self._done.txids()
        committed = self._history.committed()  # read after the txids, because files are moved after their commit
        ahead = [str(txid) for txid in sorted(txids) if txid > committed and self._done.has_files(txid)]
        if ahead:
            raise HoleDetected(
                f"{self._done.done} has files of txid {first_names(ahead)}, but this ledger has committed no more than "
                f"{committed}: it was restored from an older backup, or is not the one that moved them. Nothing is planned, "
                f"because what they held is not in the state. Move them back to {self._place}, and run again; or declare a "
                "done folder of its own, if they belong to another pipeline or database."
            )

    def _wait_for_young(self) -> bool:
        if not self._young or not 0 < self._min_age_seconds <= LONGEST_WAIT_SECONDS:
            return False
        ends_at = time.monotonic() + self._min_age_seconds
        logger.info("%s: waiting for %s to be %d s old", self._place, first_names(self._young), self._min_age_seconds)
        while time.monotonic() < ends_at and all(self._is_young(name) for name in self._young):
            time.sleep(0.1)
        self._new, self._young = self._identified(self._young), []  # no other new name is left, as the batch is empty
        return True

    def _is_young(self, name: str) -> bool:
        try:
            return is_young((self._place / name).stat(), self._min_age_seconds)
        except OSError:
            return False  # the error comes again, and is reported, when the file is to be taken
