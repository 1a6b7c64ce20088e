"""A source that is composed of others: their rows are merged, or joined within a batch, or joined with references.

    metadata = {"inputs": {name: slice}, "idle": {name: position}, "references": {name: version}}

`inputs` is what the batch reads, `idle` has the positions of the other inputs, so that none is ever lost, and `references` the
version of each reference, the files that the batch is joined with. All of it is frozen under the one txid of the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from os.path import normpath, realpath
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.sources import Dataset, LeftAlone, Source
from jobs.sources.files.source import Files
from jobs.sources.fixed_batches import FixedBatches
from jobs.sources.inputs.reference import Reference
from jobs.sources.kafka.source import Kafka
from state_store.columns import check_name
from state_store.declaration import SourceKind, SourceMetadata, composed_of
from state_store.errors import SourceUnreadable
from state_store.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from jobs.pipeline import Pipeline
    from jobs.sources.inputs.plan import InputsCoordinator
    from jobs.sources.inputs.read import InputsEmitter
    from state_store.attempts import Attempt

_WEAKEST_FIRST: tuple[SourceKind, ...] = ("non-transactional", "opaque", "transactional")


@dataclass(frozen=True)
class Inputs(Source):
    """Several sources in one pipeline, by name, and references that their rows are joined with.

    The pipeline's transform gets a mapping of these names to DataFrames:

        source=Inputs({"flights": Files(...), "late": Kafka(...), "planes": Reference(Files(...))}),
        transform=lambda inputs: inputs["flights"].unionByName(inputs["late"]).join(inputs["planes"], "tailnum", "left"),

    Without a transform the inputs are merged: they need the same columns, and a batch has the rows of all of them.

    A batch has the next slice of each input that has new rows; an input that has none is a DataFrame without rows. With
    `wait_for_all`, there is a batch only when every input has a slice, so that slices can be joined: the first with the first,
    the second with the second. What an input lacks meanwhile is never made up for: a row finds its partner only in its batch.
    What only moves an input's position, such as a version of a Delta table that adds no rows, is a batch of its own.

    The kind is that of the weakest input: one opaque input makes all of it opaque. `kind="opaque"` declares it so, for
    references that may be overwritten before a batch has committed: it is then planned again with the new version.

    A name is an input's position in the ledger, so it stays. An input may be added, or taken out, if the pipeline's version is
    raised; it then begins at its beginning, or goes on where it was. It is changed like any source: by raising the version.
    """

    sources: Mapping[str, Source | Reference]
    wait_for_all: bool = False
    kind: SourceKind = None  # type: ignore[assignment] # decided by the inputs unless it is given

    def __post_init__(self) -> None:
        for name, source in self.sources.items():
            check_name("input", name)
            if isinstance(source, Inputs):
                raise TypeError(f"Input {name} has inputs of its own: name them all in one Inputs(...).")
            if not isinstance(source, Reference) and not callable(getattr(source, "coordinator", None)):
                raise TypeError(f"Input {name} has to be a source or a Reference, not {type(source).__name__}.")
        if not self.parts or len(self.sources) < 2:
            raise ValueError("Inputs needs two sources, or a source and a Reference. A source by itself needs no Inputs.")
        weakest = next(kind for kind in _WEAKEST_FIRST if any(part.kind == kind for part in self.parts.values()))
        if self.kind is None:
            object.__setattr__(self, "kind", weakest)
        elif self.kind not in _WEAKEST_FIRST or _WEAKEST_FIRST.index(self.kind) > _WEAKEST_FIRST.index(weakest):
            raise ValueError(f"Inputs cannot be {self.kind!r}: one of them is {weakest}, and the whole is no better.")
        self._check_different()
        self._check_folders()

    def _check_different(self) -> None:
        names: dict[tuple[str, str | None], str] = {}
        for name, part in self.parts.items():
            if isinstance(part, FixedBatches):
                continue  # their lists may differ, which are no part of their identity
            brokers = part.bootstrap if isinstance(part, Kafka) else None  # nor are they, but two clusters have two topics
            if (other := names.setdefault((part.identity, brokers), name)) != name:
                raise ValueError(
                    f"Inputs {other} and {name} are the same source, so each row would come twice. Declare it once; a "
                    "transform may join it with itself."
                )

    def _check_folders(self, real: Callable[[str], str] = normpath) -> None:
        """Refuse a folder that files are moved or copied to, or moved from, if another one lies in it, or it in another.

        `real` turns a declared folder into a path that can be compared.

        Raises: ValueError.
        """
        places: list[tuple[str, str, bool]] = []  # input, folder, whether Tidegate puts files there or takes them away
        for name, source in self.sources.items():
            files, receiver = (source.files, source.keep_folder) if isinstance(source, Reference) else (source, None)
            if isinstance(files, Files):
                receiver = receiver or files.done_folder
                places.append((name, files.folder, files.done_folder is not None))
            places += [(name, receiver, True)] if receiver else []
        for (name, folder, is_written), (other, place, is_written_too) in combinations(places, 2):
            of_one = name == other and name in self.parts  # Files compares its folder and its done folder itself
            if (is_written or is_written_too) and not of_one and _overlap(real(folder), real(place)):
                raise ValueError(
                    f"Inputs {name} and {other} share a folder, {folder} and {place}, which one of them writes into or "
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

    def check_pipeline(self, pipeline: "Pipeline") -> None:
        """Refuse a pipeline that follows itself, quarantines, or has no transform where it needs one.

        Raises: ValueError.
        """
        me = f"Pipeline {pipeline.name} of several inputs"
        for part in self.parts.values():
            part.check_pipeline(pipeline)
        if pipeline.on_poison == "quarantine":
            raise ValueError(
                f"{me} cannot set bad records aside: a record that is taken up later would miss the rows, and the version of "
                "references, that it was to be joined with. Use on_poison='block' or 'skip'."
            )
        if pipeline.transform is None:
            if self.references:
                raise ValueError(f"{me} needs a transform that joins with {', '.join(self.references)}.")
            self._check_columns(me)
        elif pipeline.check and len(self.parts) > 1:
            raise ValueError(
                f"{me} cannot check single records before a transform: they have different columns. Leave check out, and let "
                "the transform or checks of the whole batch do it."
            )

    def _check_columns(self, me: str) -> None:
        """Refuse to merge sources that are known to have different columns; their types are compared when they are read."""
        columns_of = {name: columns for name, part in self.parts.items() if (columns := _declared_columns(part)) is not None}
        first = next(iter(columns_of), "")
        for name, columns in columns_of.items():
            if different := sorted(columns ^ columns_of[first]):
                raise ValueError(
                    f"{me} needs a transform, because {first} and {name} have different columns: only one of them has "
                    f"{different[0]}. A transform may select, unionByName or join."
                )

    @property
    def identity(self) -> str:
        """Return the identities of all inputs, by name."""
        inputs, references = (
            {name: source.identity for name, source in sources.items()} for sources in (self.parts, self.references)
        )
        return composed_of(inputs, references)

    def coordinator(self, settings: Settings) -> "InputsCoordinator":
        """Return a coordinator that asks those of the inputs, each made when first asked.

        Raises: SourceUnreadable if inputs share a folder that one of them writes into, by links or an absolute path.
        """
        try:
            self._check_folders(lambda folder: realpath(settings.home / folder))
        except ValueError as error:
            raise SourceUnreadable(str(error)) from None
        from jobs.sources.inputs.plan import InputsCoordinator  # noqa: PLC0415 - a declaration must not load SQLAlchemy

        return InputsCoordinator(self, settings)

    def emitter(self, spark: "SparkSession", settings: Settings) -> "InputsEmitter":
        """Return an emitter that reads each input by its own emitter."""
        from jobs.sources.inputs.read import InputsEmitter  # noqa: PLC0415 - a declaration must not load SQLAlchemy

        return InputsEmitter(self, spark, settings)

    def datasets(self, metadata: SourceMetadata, settings: Settings) -> Sequence[Dataset]:
        """Return what the batch reads of its inputs, and the references."""
        datasets = [
            dataset for name, part in self._read(metadata) for dataset in part.datasets(metadata["inputs"][name], settings)
        ]
        for name, version in metadata["references"].items():
            if name in self.references:
                datasets += self.references[name].datasets(version, settings)
        return datasets

    def left_alone(self, settings: Settings) -> LeftAlone | None:
        """Return the names that are not read at any of the inputs, each with its place."""
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
        """Return what the inputs and references hold back, a sentence each."""
        return " ".join(sentence for source in self.sources.values() if (sentence := source.held_back(settings))) or None

    @property
    def keeps_files(self) -> bool:
        """Whether one of the inputs has files; each content counts once per input."""
        return any(part.keeps_files for part in self.parts.values())

    @property
    def wants_acks(self) -> bool:
        """Whether one of the inputs wants acks."""
        return any(part.wants_acks for part in self.parts.values())

    def ack(self, attempt: "Attempt", settings: Settings) -> None:
        """Give the batch's ack to each input that it has read.

        Raises: ExceptionGroup of what the inputs raise; each has had its ack by then.
        """
        self._call(attempt, lambda part, share: part.ack(share, settings) if part.wants_acks else None)

    def fail(self, attempt: "Attempt", error: Exception, settings: Settings) -> None:
        """Call `fail` of each input that the batch has read.

        Raises: ExceptionGroup of what the inputs raise, after all were called.
        """
        self._call(attempt, lambda part, share: part.fail(share, error, settings))

    def _call(self, attempt: "Attempt", call: "Callable[[Source, Attempt], None]") -> None:
        raised: list[Exception] = []
        for name, part in self._read(attempt.source_metadata):
            try:
                call(part, replace(attempt, source_metadata=attempt.source_metadata["inputs"][name]))
            except Exception as error:  # noqa: BLE001 - raised below, when the others have been called too
                raised.append(error)
        if raised:
            raise ExceptionGroup(f"{attempt}: inputs failed", raised)

    def _read(self, metadata: SourceMetadata) -> list[tuple[str, Source]]:
        """Return those of the inputs that a batch reads which are still declared."""
        return [(name, self.parts[name]) for name in metadata["inputs"] if name in self.parts]


def _declared_columns(part: Source) -> set[str] | None:
    """Return the names of a source's columns, None if the declaration does not have them."""
    if isinstance(part, Files):
        return {*(part.schema or ("value",)), *part.partitions}
    schema = getattr(part, "schema", None)
    return set(schema) if isinstance(schema, Mapping) else None


def _overlap(folder: str, other: str) -> bool:
    one, two = Path(folder), Path(other)
    return one.is_relative_to(two) or two.is_relative_to(one)
