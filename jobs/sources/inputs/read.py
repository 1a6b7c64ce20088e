"""Reads a batch of several inputs: each by its own emitter, and the references in the versions of the batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

from tidegate.jobs.sources import BatchPart, Emitter, InputFacts, Source, Waiting
from tidegate.jobs.sources.inputs.plan import not_declared
from tidegate.jobs.sources.inputs.source import Inputs
from tidegate.state_store.base.errors import DeclarationInvalid, SourceChanged, TidegateError, skip_command
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.ledger.batches import QUARANTINED
from tidegate.state_store.ledger.counted_files import INPUTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import types as T

    from tidegate.state_store.attempt.attempts import Attempt


ADVICE = (
    "It is a reference of this batch: put back what was planned until the batch has committed; later batches take the new "
    f"version. Or give the batch up: {skip_command()}"
)


class InputsEmitter(Emitter):
    """Reads the slices of inputs that the metadata of a batch names."""

    def __init__(self, source: Inputs, spark: "SparkSession", emitter_of: Callable[[Source], Emitter]) -> None:
        self._spark = spark
        self._inputs = {name: emitter_of(part) for name, part in source.parts.items()}
        is_replanned = source.kind != "transactional"
        self._references = {
            name: emitter_of(reference.as_read(is_replanned=is_replanned)) for name, reference in source.references.items()
        }
        for emitter in self._references.values():
            emitter.advice = ADVICE

    def emit_parts(
        self, attempt: "Attempt", metadata: SourceMetadata, *, flagged: bool, with_idle: bool = True
    ) -> Mapping[str, BatchPart]:
        """Return the rows of each input and reference, by name; `with_idle` adds inputs without new rows, as empty frames."""
        shares = dict(self._shares(metadata))
        parts = {
            name: emitter.emit_parts(replace(attempt, source_metadata=shares[name]), shares[name], flagged=flagged)[""]
            for name, emitter in self._inputs.items()
            if name in shares
        }
        return self._completed(parts, attempt, shares, with_idle=with_idle)

    def replay_parts(self, attempt: "Attempt", waiting: Waiting, *, with_idle: bool = True) -> Mapping[str, BatchPart]:
        """Return the records of each input that has some in the batch, and the references; `with_idle` adds other inputs."""
        before = (attempt.source_metadata["source"] or {}).get(INPUTS) or {}
        parts: dict[str, BatchPart] = {}
        for name in attempt.source_metadata["records"]:
            emitter = self.of_input(name)
            replayed = emitter.replayed_columns(before.get(name) or {})
            parts[name] = BatchPart(waiting(name, emitter), "input", lambda: None, replayed)
        return self._completed(parts, attempt, dict(self._shares(attempt.source_metadata)), with_idle=with_idle)

    def _completed(
        self, parts: dict[str, BatchPart], attempt: "Attempt", shares: Mapping[str, SourceMetadata], *, with_idle: bool
    ) -> dict[str, BatchPart]:
        """Return these inputs with the others, which have no rows, if they are wanted; and with the references."""
        completed = {
            name: parts.get(name) or BatchPart(self._spark.createDataFrame([], emitter.row_schema()), "idle", lambda: 0)
            for name, emitter in self._inputs.items()
            if name in parts or with_idle
        }
        for name, emitter in self._references.items():
            its_attempt = replace(attempt, source_metadata=shares[name])
            completed[name] = replace(emitter.emit_parts(its_attempt, shares[name], flagged=False)[""], role="reference")
        return completed

    def emit_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the rows of all inputs, if they have the same columns."""
        return self._merged(attempt, metadata, flagged=False)

    def emit_records(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the records of all inputs, if they have the same columns."""
        return self._merged(attempt, metadata, flagged=True)

    def _merged(self, attempt: "Attempt", metadata: SourceMetadata, *, flagged: bool) -> "DataFrame":
        parts = self.emit_parts(attempt, metadata, flagged=flagged)
        frames = {name: part.rows for name, part in parts.items() if part.role != "reference"}
        return merged(frames, {name: rows.schema for name, rows in frames.items()})

    def row_schema(self) -> str:
        """Return the columns of the first input, which merged inputs share."""
        return next(iter(self._inputs.values())).row_schema()

    def facts(self, attempt: "Attempt", metadata: SourceMetadata) -> InputFacts:
        """Return the facts of all inputs and references together; `rows` has those of the inputs alone."""
        shares = dict(self._shares(metadata))
        facts = {
            name: emitter.facts(replace(attempt, source_metadata=shares[name]), shares[name])
            for name, emitter in self._all.items()
            if name in shares
        }
        rows = [each.rows for name, each in facts.items() if name in self._inputs]
        sizes = [each.bytes for each in facts.values()]
        return InputFacts(
            sum(each.files for each in facts.values()),
            None if None in sizes else sum(size or 0 for size in sizes),
            None if None in rows else sum(number or 0 for number in rows),
            is_verified=all(each.is_verified for each in facts.values()),
        )

    def expected_rows(self, metadata: SourceMetadata) -> int | None:
        """Return the number of rows of all inputs; None if one is unknown."""
        shares = dict(self._shares(metadata))
        rows = [emitter.expected_rows(shares[name]) for name, emitter in self._inputs.items() if name in shares]
        return None if None in rows else sum(number or 0 for number in rows)

    def verify_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> None:
        """Check that each input, and each reference, had the rows of the metadata."""
        for name, share in self._shares(metadata):
            self._all[name].verify_batch(replace(attempt, source_metadata=share), share)

    def verify_replay(self, attempt: "Attempt") -> None:
        """Check that each reference had the rows of the metadata."""
        self.verify_batch(attempt, attempt.source_metadata)

    def undeclared(self) -> Mapping[str, Sequence[str]]:
        """Return the columns of each input and reference that are neither declared nor ignored."""
        return {name: names for name, emitter in self._all.items() for names in emitter.undeclared().values()}

    def of_input(self, name: str) -> Emitter:
        """Return the emitter of an input.

        Raises: SourceChanged.
        """
        if name not in self._inputs:
            raise SourceChanged(not_declared(name))
        return self._inputs[name]

    def explain(self, error: Exception) -> TidegateError | None:
        """Return the explanation of the first input or reference that has one."""
        return next((cause for emitter in self._all.values() if (cause := emitter.explain(error))), None)

    @property
    def _all(self) -> dict[str, Emitter]:
        return {**self._inputs, **self._references}

    def _shares(self, metadata: SourceMetadata) -> Iterator[tuple[str, SourceMetadata]]:
        """Yield each input and reference that the batch reads, with its slice or version; a replay reads no slice.

        Raises: SourceChanged if the batch was planned with other inputs or references than those that are declared.
        """
        slices = {} if QUARANTINED in metadata else metadata.get(INPUTS)
        if slices is None or "references" not in metadata:
            raise SourceChanged(
                "The batch was planned from a source without inputs. Declare that one until the batch has committed, or give "
                f"the batch up: {skip_command()}"
            )
        if missing := [name for name in self._references if name not in metadata["references"]]:
            raise SourceChanged(
                f"The batch was planned without reference {missing[0]}, so it has no version of it. Take the reference out "
                f"until the batch has committed, or give the batch up: {skip_command()}"
            )
        for name, share in (*slices.items(), *metadata["references"].items()):
            if name not in self._all:
                raise SourceChanged(not_declared(name))
            yield name, share


def merged(frames: "Mapping[str, DataFrame]", schemas: "Mapping[str, T.StructType]") -> "DataFrame":
    """Return the rows of all frames, by the columns of the first one; `schemas` has the frames' own, to save round trips.

    Raises: DeclarationInvalid if they have different columns or types.
    """
    (first, expected), *others = ((name, _types(schema)) for name, schema in schemas.items())
    for name, types in others:
        if different := sorted(expected.items() ^ types.items()):
            column = different[0][0]
            raise DeclarationInvalid(
                f"Inputs {first} and {name} are merged, but {column} is {expected.get(column, 'missing')} in {first}, and "
                f"{types.get(column, 'missing')} in {name}. Declare the same columns, or a transform that selects and casts."
            )
    return reduce(lambda left, right: left.unionByName(right), frames.values())


def _types(schema: "T.StructType") -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in schema}
