"""Partitioned sources: a batch has one slice per partition, and its metadata freezes all slices together.

    metadata = {"partitions": {name: slice}, "idle": {name: last slice}}

`partitions` is what the batch reads; `idle` holds the positions of the other known partitions, so that none is ever lost.
A new partition joins with the next new txid. A partition that vanishes or cannot be reached stops a transactional source
with a named error, because its batch could not be replayed; an opaque source leaves it idle, and a later batch has its rows
(docs/semantics.md).
"""

import logging
from collections.abc import Collection
from typing import Protocol

from tidegate.jobs.sources import Coordinator
from tidegate.state_store.base.errors import PartitionUnavailable
from tidegate.state_store.declarations.pipeline_spec import SourceKind, SourceMetadata

logger = logging.getLogger(__name__)


def last_slices(metadata: SourceMetadata) -> dict[str, SourceMetadata]:
    """Return the last slice of every known partition."""
    return {**metadata["idle"], **metadata["partitions"]}


class Partitions(Protocol):
    """What the author of a partitioned source implements: the partitions, and their next slices, for one plan."""

    def names(self) -> Collection[str]:
        """Return the partitions that exist now.

        Raises: SourceUnavailable if they cannot be listed.
        """

    def next_slice(self, partition: str, previous: SourceMetadata | None) -> SourceMetadata | None:
        """Return the slice after the previous one (None: the partition is new), or None if there is no new data.

        Raises: PartitionUnavailable, RangeExpired.
        """


class PartitionedCoordinator(Coordinator):
    """Plans batches over all partitions, by the rules of the source's kind."""

    def __init__(self, kind: SourceKind, partitions: Partitions) -> None:
        self._kind = kind
        self._partitions = partitions

    def initialize_transaction(
        self, txid: int, previous_metadata: SourceMetadata | None, current_metadata: SourceMetadata | None
    ) -> SourceMetadata | None:
        """Return one slice for every partition with new data; None if there is none.

        Raises: PartitionUnavailable if a transactional source misses a partition; what `next_slice` raises.
        """
        if current_metadata is not None and self._kind == "transactional":
            return current_metadata
        last = last_slices(previous_metadata) if previous_metadata else {}
        names = sorted(self._partitions.names())
        if gone := sorted(last.keys() - set(names)):
            self._report_missing(txid, PartitionUnavailable(f"Partition {', '.join(gone)} of the source has vanished."))
        slices: dict[str, SourceMetadata] = {}
        for name in names:
            try:
                following = self._partitions.next_slice(name, last.get(name))
            except PartitionUnavailable as unavailable:
                self._report_missing(txid, unavailable)
                continue
            if following is not None:
                slices[name] = following
        if not slices and current_metadata is None:
            return None
        return {"partitions": slices, "idle": {name: each for name, each in last.items() if name not in slices}}

    def _report_missing(self, txid: int, unavailable: PartitionUnavailable) -> None:
        if self._kind == "transactional":
            raise unavailable
        logger.warning("Batch %d goes without it: %s Its rows come in a later batch.", txid, unavailable)
