"""Compares what a partition has right before a planned position with what it had there when the position was planned.

A log may be cut and grow again, as by an unclean election; or all of the brokers' disks are put back from a copy, which the
numbers of the leaders' terms (epochs) may not show. Other records then have the offsets that were planned or read.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tidegate.state_store.base.errors import PartitionUnavailable, SourceChanged
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

if TYPE_CHECKING:
    from tidegate.jobs.sources.kafka.topic import Topic

LEADER_EPOCH = "leader_epoch"  # in a slice: that of the partition's end when it was planned
LAST_RECORD = "last_record"  # in a slice: the digest of the record before its end; None: that offset has none


def with_last_records(topic: "Topic", slices: Mapping[str, SourceMetadata]) -> dict[str, SourceMetadata]:
    """Return slices with what identifies the record before their ends.

    Raises: SourceChanged, PartitionUnavailable.
    """
    found = topic.last_records({int(name): (each["end"], each.get(LEADER_EPOCH)) for name, each in slices.items()})
    for answer in found.values():
        if isinstance(answer, (SourceChanged, PartitionUnavailable)):
            raise answer
    return {name: {**each, LAST_RECORD: found[int(name)]} for name, each in slices.items()}


def losses(topic: "Topic", slices: Mapping[str, SourceMetadata]) -> dict[str, str | PartitionUnavailable | None]:
    """Return for each partition how its log was cut before the end of its slice; None: it was not.

    The ends of the topic were asked for before. The slices end after the first offset that is left.
    """
    cuts: dict[str, str | PartitionUnavailable | None] = {}
    asked = {}
    for name, last in slices.items():
        epoch, now = last.get(LEADER_EPOCH), topic.leader_epochs.get(int(name))
        if epoch is not None and now is not None and now < epoch:  # its leader would not know the epoch, and not answer
            cuts[name] = f"they are an older copy (leader epoch {epoch}, now {now})"
        else:
            asked[int(name)] = (last["end"], None if now is None else epoch)
    found = topic.last_records(asked) if asked else {}
    for number, answer in found.items():
        last = slices[str(number)]
        if isinstance(answer, SourceChanged):
            cuts[str(number)] = str(answer).rstrip(".")
        elif isinstance(answer, PartitionUnavailable):
            cuts[str(number)] = answer
        else:  # a record may be compacted away, but none appears, and none changes
            is_another = answer is not None and answer != last.get(LAST_RECORD, answer)
            cuts[str(number)] = f"the record at offset {last['end'] - 1} is another one now" if is_another else None
    return cuts
