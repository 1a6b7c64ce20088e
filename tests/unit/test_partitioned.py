"""Partitioned sources, by partitions in this process."""

from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from tests.store import SourceMetadata
from tidegate.jobs.sources.partitioned import PartitionedCoordinator
from tidegate.state_store.base.errors import PartitionUnavailable


@dataclass
class Counters:
    """Partitions whose slices are numbers one after another; those that are out of reach have no next one."""

    exist: list[str]
    out_of_reach: set[str] = field(default_factory=set)

    def names(self) -> Collection[str]:
        return self.exist

    def next_slice(self, partition: str, previous: SourceMetadata | None) -> SourceMetadata | None:
        if partition in self.out_of_reach:
            raise PartitionUnavailable(f"{partition} has no leader")
        return {"at": previous["at"] + 1 if previous else 1}


@pytest.mark.parametrize("away", [Counters(["a"]), Counters(["a", "b"], {"b"})], ids=["vanished", "out of reach"])
def test_a_partition_that_is_away_stops_a_transactional_source_only(away: Counters) -> None:
    first = PartitionedCoordinator("opaque", Counters(["a", "b"])).initialize_transaction(1, None, None)
    assert first == {"partitions": {"a": {"at": 1}, "b": {"at": 1}}, "idle": {}}
    with pytest.raises(PartitionUnavailable, match="b"):
        PartitionedCoordinator("transactional", away).initialize_transaction(2, first, None)
    second = PartitionedCoordinator("opaque", away).initialize_transaction(2, first, None)
    assert second == {"partitions": {"a": {"at": 2}}, "idle": {"b": {"at": 1}}}
    third = PartitionedCoordinator("opaque", Counters(["a", "b"])).initialize_transaction(3, second, None)
    assert third == {"partitions": {"a": {"at": 3}, "b": {"at": 2}}, "idle": {}}
