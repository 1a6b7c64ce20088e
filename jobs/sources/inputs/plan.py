"""Plans batches of several inputs: a slice of each that has new rows, the positions of the others, versions of references."""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from os.path import realpath
from typing import Any

from tidegate.jobs.sources import Coordinator, History
from tidegate.jobs.sources.changes import Changes, ChangesCoordinator
from tidegate.jobs.sources.inputs.reference_versions import CoordinatorOf, version_of
from tidegate.jobs.sources.inputs.source import Inputs
from tidegate.state_store.base.errors import SourceChanged, SourceUnavailable, SourceUnreadable, skip_command
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.ledger.batches import encode_metadata
from tidegate.state_store.ledger.counted_files import FILES, INPUTS, TakenFile, name_in

logger = logging.getLogger(__name__)

BEGINNING: SourceMetadata = {"to": ["0"]}  # of changes that were not read yet


class InputsCoordinator(Coordinator):
    """Asks the coordinator of each input, for one plan."""

    def __init__(self, source: Inputs, settings: Settings, coordinator_of: CoordinatorOf) -> None:
        """Take the function that returns the coordinator of an input.

        Raises: SourceUnreadable if inputs share a folder that one of them writes into, through links or absolute paths.
        """
        try:
            source.check_folders(lambda folder: realpath(settings.home / folder))
        except ValueError as error:
            raise SourceUnreadable(str(error)) from None
        self._source = source
        self._settings = settings
        self._coordinator_of = coordinator_of
        self._history: History | None = None
        self._committed: int | None = None
        self._coordinators: dict[str, Coordinator] = {}
        self._away: set[str] = set()  # opaque inputs that could not be reached: each try may take as long as a time limit
        self._references: dict[str, SourceMetadata] = {}  # the versions of references: all batches of one plan have the same

    def look_back(self, history: History) -> None:
        """Keep the history; each input sees only its own files in it."""
        self._history = history

    def success(self, txid: int) -> None:
        """Keep the last committed txid for the inputs."""
        self._committed = txid

    def initialize_transaction(
        self, txid: int, previous_metadata: SourceMetadata | None, current_metadata: SourceMetadata | None
    ) -> SourceMetadata | None:
        """Return a slice of each input with new rows, and the version of each reference; None if there is nothing new.

        When a batch is planned again, its inputs stay the same: each opaque one chooses its rows again, others keep theirs.

        Raises: SourceChanged if the previous batch has another kind of source, or this one an undeclared input;
        SourceUnavailable; the errors of inputs and references.
        """
        if current_metadata is not None and self._source.kind == "transactional":
            return current_metadata
        positions = _positions(previous_metadata)
        if current_metadata is None:
            slices = self._new_slices(txid, positions)
        else:
            slices = self._slices_again(txid, positions, current_metadata[INPUTS])
        if not slices:
            return None
        references = self._versions()
        if references is None:
            if current_metadata is None:
                return None
            raise SourceUnavailable("A reference may still be written. The batch is planned again when it is complete.")
        idle = {name: _position_in(last) for name, last in positions.items() if name not in slices}
        return {INPUTS: slices, "idle": idle, "references": references}

    def _new_slices(self, txid: int, positions: Mapping[str, SourceMetadata]) -> dict[str, SourceMetadata] | None:
        """Return the next slice of each input that has one; None if the batch has to wait."""
        slices: dict[str, SourceMetadata] = {}
        for name in (name for name in self._source.parts if name not in self._away):
            try:
                coordinator = self._coordinator(name)
                following = (
                    coordinator.initialize_transaction(txid, positions.get(name), None) if coordinator.is_ready(txid) else None
                )
            except SourceUnavailable as unavailable:
                if self._source.parts[name].kind == "transactional":
                    raise
                logger.warning("From batch %d on, input %s is left to a later plan: %s", txid, name, unavailable)
                self._away.add(name)
                following = None
            if following is not None:
                slices[name] = following
        self._end_together(txid, slices, positions)
        return self._with_partners(txid, slices) if self._source.wait_for_all else slices

    def _end_together(self, txid: int, slices: dict[str, SourceMetadata], positions: Mapping[str, SourceMetadata]) -> None:
        """Let the changes of states that one pipeline writes end at the same of its txids: they belong together.

        Each of them looks at the other pipeline by itself, and has limits of its own.
        """
        followed: dict[str, list[str]] = defaultdict(list)
        for name, part in self._source.parts.items():
            if isinstance(part, Changes):
                followed[part.pipeline].append(name)
        for names in followed.values():
            ends = {name: int((slices.get(name) or positions.get(name) or BEGINNING)["to"][0]) for name in names}
            until = min(ends.values())
            for name in (name for name, end in ends.items() if end > until and name in slices):
                coordinator = self._coordinator(name)
                assert isinstance(coordinator, ChangesCoordinator)
                coordinator.until = until
                shorter = coordinator.initialize_transaction(txid, positions.get(name), None) if until else None
                coordinator.until = None
                del slices[name]
                slices |= {name: shorter} if shorter else {}

    def _with_partners(self, txid: int, slices: dict[str, SourceMetadata]) -> dict[str, SourceMetadata] | None:
        """Return the slices if each has a partner in every other input; else None, or those that only move their positions.

        These are no partners: what they were joined with would find no row. They are a batch of their own, so that no position
        is lost, and the slices that still wait are planned again by the next batch.
        """
        moves = {
            name: following
            for name, following in slices.items()
            if self._source.parts[name].kind == "transactional" and not self._source.parts[name].has_rows(following)
        }
        missing = [name for name in self._source.parts if name not in slices or name in moves]
        if not slices or not missing:
            return slices
        logger.info("Batch %d does not have new rows of %s, which others wait for.", txid, ", ".join(missing))
        for name in slices.keys() - moves.keys():
            del self._coordinators[name]
        return moves or None

    def _slices_again(
        self, txid: int, positions: Mapping[str, SourceMetadata], current: Mapping[str, SourceMetadata]
    ) -> dict[str, SourceMetadata]:
        slices: dict[str, SourceMetadata] = {}
        for name, saved in current.items():
            if name not in self._source.parts:
                raise SourceChanged(not_declared(name))
            slices[name] = saved
            if self._source.parts[name].kind != "transactional":
                replanned = self._coordinator(name).initialize_transaction(txid, positions.get(name), saved)
                if replanned is None:
                    raise SourceUnavailable(f"Input {name} has nothing in place of what it planned before.")
                slices[name] = replanned
        return slices

    def _coordinator(self, name: str) -> Coordinator:
        if name not in self._coordinators:
            coordinator = self._coordinator_of(self._source.parts[name], self._settings)
            if self._history is not None:
                coordinator.look_back(HistoryOfInput(self._history, name))
            if self._committed is not None:
                coordinator.success(self._committed)
            self._coordinators[name] = coordinator
        return self._coordinators[name]

    def _versions(self) -> dict[str, SourceMetadata] | None:
        """Return each reference's version, the same for all batches of a plan; None while a file may still be written."""
        for name, reference in self._source.references.items():
            if name in self._references:
                continue
            version = version_of(reference, self._settings, self._coordinator_of)
            if version is None:
                logger.warning("No batch is planned while reference %s may still be written. Run again later.", name)
                return None
            self._references[name] = version
        return dict(self._references)


@dataclass(frozen=True)
class HistoryOfInput:
    """The ledger's record of earlier batches for one input: its own files only, by their names in the input's folder."""

    history: History
    name: str

    def committed(self) -> int:
        """Return the last committed txid."""
        return self.history.committed()

    def taken_files(self, names: Sequence[str], before_txid: int) -> Iterator[tuple[str, Sequence[TakenFile]]]:
        """Yield each name with its files in batches before a txid."""
        start = len(name_in(self.name, ""))
        for name, files in self.history.taken_files([name_in(self.name, name) for name in names], before_txid):
            yield name[start:], [replace(file, name=file.name[start:]) for file in files]

    def files_of_times(self, times: Collection[int], inodes: Collection[str], before_txid: int) -> Sequence[TakenFile]:
        """Return the files with these modification times in batches before a txid."""
        mine = name_in(self.name, "")
        files = self.history.files_of_times(times, inodes, before_txid)
        return [replace(file, name=file.name.removeprefix(mine)) for file in files if file.name.startswith(mine)]

    def note_times(self, files: Sequence[TakenFile]) -> None:
        """Record the new modification times of files that have counted."""
        self.history.note_times([replace(file, name=name_in(self.name, file.name)) for file in files])


def versions_now(source: Inputs, settings: Settings, coordinator_of: CoordinatorOf) -> SourceMetadata:
    """Return what is frozen with a batch of quarantined records: the versions of references as of now.

    Raises: SourceUnavailable while a file may still be written; the errors of `version_of`.
    """
    versions = {name: version_of(reference, settings, coordinator_of) for name, reference in source.references.items()}
    if waiting := [name for name, version in versions.items() if version is None]:
        raise SourceUnavailable(f"Reference {waiting[0]} may still be written. Replay when it is complete.")
    return {"references": versions}


def not_declared(name: str) -> str:
    """Return the reason why a batch cannot be read without an input or reference that it was planned with."""
    return (
        f"The batch was planned with input {name}, which the pipeline does not declare any more. Declare it again until the "
        f"batch has committed, or give the batch up: {skip_command()}"
    )


def _positions(previous: SourceMetadata | None) -> dict[str, SourceMetadata]:
    """Return each input's position after the previous batch, also of inputs that are not declared at present."""
    if previous is None:
        return {}
    if not {INPUTS, "idle"} <= previous.keys():
        raise SourceChanged(
            "The batches before are of a source without inputs, so nothing is known of where these stand. Give the pipeline "
            "and its states new names, or declare the earlier source again."
        )
    return {**previous["idle"], **previous[INPUTS]}


def _position_in(last: SourceMetadata) -> dict[str, Any]:
    """Return an idle input's last slice without its files, which the ledger knows; with its last name and place."""
    if not last.get(FILES):
        return last
    return {**last, FILES: [], "behind": sha256(encode_metadata(last)).hexdigest()}
