"""A source composed of others: a batch merges their rows, or joins them, also with references.

    metadata = {"inputs": {name: slice}, "idle": {name: position}, "references": {name: version}}

A slice is the metadata of what the batch reads from one input. `idle` keeps the positions of the other inputs.
`references` has the versions of the files or tables that the batch is joined with. All is frozen under the batch's one txid.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from os.path import normpath
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.jobs.sources import Dataset, LeftAlone, Source
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.fixed_batches import FixedBatches
from tidegate.jobs.sources.inputs.reference import Reference
from tidegate.jobs.sources.kafka.source import Kafka
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.column_spec import check_name
from tidegate.state_store.declarations.pipeline_spec import SourceKind, SourceMetadata, composed_of

if TYPE_CHECKING:
    from tidegate.state_store.attempt.attempts import Attempt

_WEAKEST_FIRST: tuple[SourceKind, ...] = ("non-transactional", "opaque", "transactional")


@dataclass(frozen=True)
class Inputs(Source):
    """Several named sources in one pipeline, and references that their rows are joined with.

    The pipeline's transform gets a mapping of these names to DataFrames:

        source=Inputs({"flights": Files(...), "late": Kafka(...), "planes": Reference(Files(...))}),
        transform=lambda inputs: inputs["flights"].unionByName(inputs["late"]).join(inputs["planes"], "tailnum", "left"),

    Without a transform, the rows of all inputs are merged, so the inputs need the same columns.

    A batch has the next slice of each input that has new rows; other inputs are empty DataFrames. With `wait_for_all`, a batch
    waits until every input has new rows, so that slices can be joined: the first with the first, the second with the second. A
    row meets only the rows of its own batch, so a partner in another batch is never found. Slices that only move a position,
    such as a Delta version that adds no rows, then form a batch of their own.

    The kind is that of the weakest input: one opaque input makes the whole opaque. Declare `kind="opaque"` if references may
    be overwritten before a batch has committed: the batch is then planned again with the new version.

    The ledger keeps an input's position under its name, so names must not change. To add, remove or change an input, raise the
    pipeline's version: a new input starts at its beginning, and one that was removed earlier goes on where it stopped.
    """

    sources: Mapping[str, Source | Reference]
    wait_for_all: bool = False
    kind: SourceKind = None  # type: ignore[assignment] # decided by the inputs unless it is given

    def __post_init__(self) -> None:
        for name, source in self.sources.items():
            check_name("input", name)
            if isinstance(source, Inputs):
                raise TypeError(f"Input {name} has inputs of its own: name them all in one Inputs(...).")
            if not isinstance(source, Source | Reference):
                raise TypeError(f"Input {name} has to be a source or a Reference, not {type(source).__name__}.")
        if not self.parts or len(self.sources) < 2:
            raise ValueError("Inputs needs two sources, or a source and a Reference. A source by itself needs no Inputs.")
        weakest = next(kind for kind in _WEAKEST_FIRST if any(part.kind == kind for part in self.parts.values()))
        if self.kind is None:
            object.__setattr__(self, "kind", weakest)
        elif self.kind not in _WEAKEST_FIRST or _WEAKEST_FIRST.index(self.kind) > _WEAKEST_FIRST.index(weakest):
            raise ValueError(f"Inputs cannot be {self.kind!r}: one of them is {weakest}, and the whole is no better.")
        self._check_different()
        self.check_folders()

    def _check_different(self) -> None:
        names: dict[tuple[str, str | None], str] = {}
        for name, part in self.parts.items():
            if isinstance(part, FixedBatches):
                continue  # two of them may have the same identity and different rows: the rows are not part of it
            # The brokers are not part of a topic's identity, but topics of two clusters are different sources.
            brokers = part.bootstrap if isinstance(part, Kafka) else None
            if (other := names.setdefault((part.identity, brokers), name)) != name:
                raise ValueError(
                    f"Inputs {other} and {name} are the same source, so each row would come twice. Declare it once; a "
                    "transform may join it with itself."
                )

    def check_folders(self, resolve: Callable[[str], str] = normpath) -> None:
        """Refuse overlapping folders if Tidegate moves or copies files into one, or moves files out of it.

        `resolve` turns a declared folder into a path that can be compared.

        Raises: ValueError.
        """
        places: list[tuple[str, str, bool]] = []  # input, folder, whether Tidegate adds or removes files there
        for name, source in self.sources.items():
            files, receiver = (source.files, source.keep_folder) if isinstance(source, Reference) else (source, None)
            if isinstance(files, Files):
                receiver = receiver or files.done_folder
                places.append((name, files.folder, files.done_folder is not None))
            places += [(name, receiver, True)] if receiver else []
        for (name, folder, is_changed), (other, other_folder, other_is_changed) in combinations(places, 2):
            is_same = name == other and name in self.parts  # Files itself compares its folder and its done folder
            if (is_changed or other_is_changed) and not is_same and _overlap(resolve(folder), resolve(other_folder)):
                raise ValueError(
                    f"Inputs {name} and {other} share a folder, {folder} and {other_folder}, which one of them writes into or "
                    "takes files from: the other would miss them, or read them twice. Give them folders of their own."
                )

    @cached_property
    def parts(self) -> dict[str, Source]:
        """The sources among the inputs, by name."""
        return {name: source for name, source in self.sources.items() if not isinstance(source, Reference)}

    @cached_property
    def references(self) -> dict[str, Reference]:
        """The references among the inputs, by name."""
        return {name: source for name, source in self.sources.items() if isinstance(source, Reference)}

    def check_pipeline(
        self, pipeline: str, *, has_transform: bool, quarantines: bool, check: Mapping[str, str | Mapping[str, str]]
    ) -> None:
        """Refuse a pipeline that reads its own states, lacks a needed transform, or could not replay records by themselves.

        Raises: ValueError.
        """
        label = f"Pipeline {pipeline} of several inputs"
        for part in self.parts.values():
            part.check_pipeline(pipeline, has_transform=has_transform, quarantines=quarantines, check=check)
        if quarantines and self.wait_for_all:
            raise ValueError(
                f"{label} cannot set bad records aside and have wait_for_all: a record that is taken up later would miss the "
                "rows of other inputs that it was to be joined with. Use on_poison='block' or 'skip'."
            )
        if not has_transform:
            if self.references:
                raise ValueError(f"{label} needs a transform that joins with {', '.join(self.references)}.")
            self._check_columns(label)
        elif len(self.parts) > 1 and (of_all := [name for name, what in check.items() if isinstance(what, str)]):
            raise ValueError(
                f"{label} cannot check the records of all inputs before a transform: they have different columns. Say which "
                f'input the check {of_all[0]!r} is for: check={{"{next(iter(self.parts))}": {{{of_all[0]!r}: "..."}}}}.'
            )

    def _check_columns(self, label: str) -> None:
        """Refuse to merge sources that declare different columns; types are compared when the rows are read."""
        columns_of = {name: columns for name, part in self.parts.items() if (columns := _declared_columns(part)) is not None}
        first = next(iter(columns_of), "")
        for name, columns in columns_of.items():
            if different := sorted(columns ^ columns_of[first]):
                raise ValueError(
                    f"{label} needs a transform, because {first} and {name} have different columns: only one of them has "
                    f"{different[0]}. A transform may select, unionByName or join."
                )

    @property
    def identity(self) -> str:
        """Return the identity of each input and reference."""
        inputs, references = (
            {name: source.identity for name, source in sources.items()} for sources in (self.parts, self.references)
        )
        return composed_of(inputs, references)

    @property
    def known_columns(self) -> Mapping[str, Sequence[str]]:
        """The columns of each input and reference that are declared or ignored."""
        files = {**self.parts, **{name: reference.files for name, reference in self.references.items()}}
        return {name: columns for name, each in files.items() for columns in each.known_columns.values()}

    def datasets(self, metadata: SourceMetadata, settings: Settings) -> Sequence[Dataset]:
        """Return the datasets of inputs and references that the batch reads; of references alone if it replays records."""
        slices = metadata.get("inputs", {})
        datasets = [each for name, part in self._inputs_read(metadata) for each in part.datasets(slices[name], settings)]
        for name, version in metadata.get("references", {}).items():
            if name in self.references:
                datasets += self.references[name].datasets(version, settings)
        return datasets

    def left_alone(self, settings: Settings) -> LeftAlone | None:
        """Return the names, such as files, that inputs do not read, each with its place."""
        reports = [report for source in self.sources.values() if (report := source.left_alone(settings)) is not None]
        if len(reports) < 2:
            return reports[0] if reports else None
        names: dict[str, list[str]] = {}
        for report in reports:
            for reason, unread in report.names.items():
                names.setdefault(reason, []).extend(f"{report.place}/{name}" for name in unread)
        places = " and ".join(dict.fromkeys(report.place for report in reports))
        patterns = " or ".join(dict.fromkeys(report.pattern for report in reports))
        return LeftAlone(places, patterns, sum(report.read for report in reports), names)

    def held_back(self, settings: Settings) -> str | None:
        """Return sentences about data left unplanned because it may change."""
        return " ".join(sentence for source in self.sources.values() if (sentence := source.held_back(settings))) or None

    @property
    def executor_packages(self) -> Sequence[str]:
        """The packages that tasks need for any input or reference."""
        sources = [*self.parts.values(), *(reference.files for reference in self.references.values())]
        return sorted({name for source in sources for name in source.executor_packages})

    @property
    def keeps_files(self) -> bool:
        """Whether an input lists files; each file content counts once per input."""
        return any(part.keeps_files for part in self.parts.values())

    @property
    def wants_acks(self) -> bool:
        """Whether an input is notified of commits."""
        return any(part.wants_acks for part in self.parts.values())

    def ack(self, attempt: "Attempt", settings: Settings) -> None:
        """Notify the inputs of a batch that it has committed.

        Raises: ExceptionGroup of the inputs' errors, after all were notified.
        """
        self._call_each(attempt, lambda part, its_attempt: part.ack(its_attempt, settings) if part.wants_acks else None)

    def fail(self, attempt: "Attempt", error: Exception, settings: Settings) -> None:
        """Call `fail` of each input of the batch.

        Raises: ExceptionGroup of the inputs' errors, after all were called.
        """
        self._call_each(attempt, lambda part, its_attempt: part.fail(its_attempt, error, settings))

    def _call_each(self, attempt: "Attempt", call: "Callable[[Source, Attempt], None]") -> None:
        raised: list[Exception] = []
        for name, part in self._inputs_read(attempt.source_metadata):
            try:
                call(part, replace(attempt, source_metadata=attempt.source_metadata["inputs"][name]))
            except Exception as error:  # noqa: BLE001 - raised below, after all were called
                raised.append(error)
        if raised:
            raise ExceptionGroup(f"{attempt}: inputs failed", raised)

    def _inputs_read(self, metadata: SourceMetadata) -> list[tuple[str, Source]]:
        """Return the inputs that a batch reads, unless no longer declared; a batch of quarantined records reads none."""
        return [(name, self.parts[name]) for name in metadata.get("inputs", ()) if name in self.parts]


def _declared_columns(part: Source) -> set[str] | None:
    """Return the column names that a source declares, None if it declares none."""
    if isinstance(part, Files):
        return {*(part.schema or ("value",)), *part.partitions}
    schema = getattr(part, "schema", None)
    return set(schema) if isinstance(schema, Mapping) else None


def _overlap(folder: str, other: str) -> bool:
    one, two = Path(folder), Path(other)
    return one.is_relative_to(two) or two.is_relative_to(one)
