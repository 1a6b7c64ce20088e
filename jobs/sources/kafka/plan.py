"""Plans ranges of a topic's offsets: begin, end and share of each partition, expired records, a topic that is another."""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tidegate.jobs.sources import OF_ANOTHER_SOURCE, History
from tidegate.jobs.sources.kafka.last_records import LAST_RECORD, LEADER_EPOCH, losses, with_last_records
from tidegate.jobs.sources.kafka.source import Kafka
from tidegate.jobs.sources.partitioned import PartitionedCoordinator, Partitions, last_slices
from tidegate.state_store.base.errors import (
    PartitionUnavailable,
    RangeExpired,
    SourceChanged,
    SourceUnavailable,
)
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

if TYPE_CHECKING:
    from tidegate.jobs.sources.kafka.topic import Topic

logger = logging.getLogger(__name__)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The position of a partition that has appeared since the last batch: none of it was read.
UNREAD = {"start": 0, "end": 0}


class KafkaCoordinator(PartitionedCoordinator):
    """Plans batches from the offsets that the topic had when the plan began."""

    def __init__(self, source: Kafka, settings: Settings) -> None:
        """Ask once where each partition begins and ends.

        Raises: SourceUnavailable (the brokers are away), SourceUnreadable (they refuse us, have no such topic, or compact it),
        SettingsInvalid.
        """
        self._source = source
        self._topic = topic = source.topic_at(settings)
        source.check_not_compacted(topic)
        self._offsets = TopicOffsets(source, topic)
        self._history: History | None = None
        super().__init__(source.kind, self._offsets)

    def look_back(self, history: History) -> None:
        """Keep the history, which says whether a batch has committed."""
        self._history = history

    def initialize_transaction(
        self, txid: int, previous_metadata: SourceMetadata | None, current_metadata: SourceMetadata | None
    ) -> SourceMetadata | None:
        """Return the next range of each partition that has one; None if none has.

        The first batch of a source that starts at "latest" is planned even without ranges: records produced until the next
        plan would be lost otherwise.

        Raises: SourceChanged if it is another topic than before, or has lost records; RangeExpired if a redo would lose some;
        PartitionUnavailable, SourceUnavailable.
        """
        if current_metadata is not None:
            if self._source.kind == "transactional":
                return current_metadata
            if (rest := self._rest_of_earlier(previous_metadata, current_metadata)) is not None:
                return rest
        before = self._predecessor(previous_metadata, current_metadata)
        self._offsets.share(last_slices(before))
        planned = super().initialize_transaction(txid, before, current_metadata)
        if planned is None:
            if previous_metadata is not None or self._source.start != "latest":
                return None
            planned = before
        place = {"topic": self._topic.name, "topic_id": self._topic.id, "generation": self._source.generation}
        planned = {**self._offsets.identified(planned), **self._note_of_loss(txid, current_metadata), **place}
        self._check_redo(txid, current_metadata, planned)
        return planned

    def _predecessor(self, previous: SourceMetadata | None, current: SourceMetadata | None) -> SourceMetadata:
        """Return what a batch follows, as metadata with the partitions' positions."""
        saved = previous or current
        if saved is not None and self._begins_again(saved):
            self._check_same_topic(current)
            return {"partitions": {}, "idle": {}}
        self._check_same_topic(saved)
        return previous or {"partitions": {}, "idle": self._starts(current)}

    def _check_redo(self, txid: int, counted: SourceMetadata | None, planned: SourceMetadata) -> None:
        """Refuse to plan a committed batch again without records that have counted in it, and that no later batch can read."""
        if counted is None or self._history is None or self._history.committed() < txid:
            return
        gone: list[str] = []
        for name, counted_slice in counted["partitions"].items():
            first = counted_slice["end"] if "given_up" in planned else last_slices(planned).get(name, UNREAD)["start"]
            if counted_slice["start"] < (until := min(first, counted_slice["end"])):
                gone.append(f"partition {name}, offsets {counted_slice['start']} to {until}")
        if gone:
            raise RangeExpired(
                f"Records of topic {counted['topic']} have counted in txid {txid} and are gone: {'; '.join(gone)}. To redo the "
                "batch would take them away. Correct it by a later batch."
            )

    def _rest_of_earlier(self, previous: SourceMetadata | None, current: SourceMetadata) -> SourceMetadata | None:
        """Return what a batch still has to read of an earlier generation, in which it was planned: up to its planned ends.

        None if it was not, if that topic is gone or is read again, or if the batch before has gone on to a later generation.
        """
        if "topic_id" not in current:
            raise SourceChanged(OF_ANOTHER_SOURCE)
        generation = current.get("generation", 1)
        before = previous.get("generation", 1) if previous and "topic_id" in previous else 0
        if not before <= generation < self._source.generation or self._topic.is_topic_of(current):
            return None
        if not self._topic.named(current["topic"]).is_still_topic_of(current):
            return None
        positions = last_slices(previous) if previous and before == generation else self._starts(current)
        rest = {
            name: planned if start == _first_offset(planned) else {"start": start, "end": planned["end"]}
            for name, planned in last_slices(current).items()
            if (start := positions.get(name, UNREAD)["end"]) < planned["end"]
        }
        idle = {name: last for name, last in positions.items() if name not in rest}
        return {**current, "partitions": rest, "idle": idle}

    def _note_of_loss(self, txid: int, current: SourceMetadata | None) -> SourceMetadata:
        """Return a note on the records of a topic that is gone, from which a batch was planned in an earlier generation."""
        is_earlier = current is not None and current.get("generation", 1) < self._source.generation
        if current is None or not is_earlier or self._topic.is_topic_of(current):
            return {}
        ranges = {name: current[name] for name in ("topic", "topic_id", "partitions")}
        logger.warning("Batch %d was planned from a topic that is gone; its records are given up: %s", txid, json.dumps(ranges))
        return {"given_up": ranges}

    def _begins_again(self, saved: SourceMetadata) -> bool:
        """Return whether the author has declared a newer generation, in which another topic follows the saved one."""
        before, now = saved.get("generation", 1), self._source.generation
        if "topic_id" not in saved and before >= now:
            raise SourceChanged(
                f"The batches so far are from another source, which says nothing of where topic {self._topic.name} stands. To "
                f"read it from its first record, with the same states, declare generation={before + 1} in the Kafka source "
                "and raise the pipeline's version."
            )
        if before > now:
            raise SourceChanged(
                f"Records of generation {before} were read already, so topic {self._topic.name} cannot be read as generation "
                f"{now} any more. Declare the newer one again."
            )
        return bool(before < now)

    def _starts(self, first_metadata: SourceMetadata | None) -> dict[str, SourceMetadata]:
        """Return each partition's position before the first batch: as planned, or by the source's start.

        Every partition has to answer, for either kind: one left out would later be taken for a new one.
        """
        if first_metadata is None:
            offsets = self._offsets.starts()
            return {name: {"start": start, "end": start, **self._offsets.epoch_of(name)} for name, start in offsets.items()}
        starts = {}
        for name, last in last_slices(first_metadata).items():
            starts[name] = {"start": (first := _first_offset(last)), "end": first}
            if LEADER_EPOCH in last:
                starts[name][LEADER_EPOCH] = last[LEADER_EPOCH]  # of the plan that found the start, and the end
        return starts

    def _check_same_topic(self, saved: SourceMetadata | None) -> None:
        """Refuse ranges of this generation that are another topic's."""
        if saved is None or saved.get("generation", 1) != self._source.generation:
            return
        advice = (
            "A position means nothing in another topic. To read this one from its first record, with the same states, declare "
            f"generation={self._source.generation + 1} in the Kafka source and raise the pipeline's version."
        )
        if saved["topic"] != self._topic.name:
            raise SourceChanged(f"The batches so far are from topic {saved['topic']}, not from {self._topic.name}. {advice}")
        if not self._topic.is_topic_of(saved):
            raise SourceChanged(
                f"Topic {self._topic.name} is another one than before (its id was {saved['topic_id']}, now it is "
                f"{self._topic.id}): it was deleted and created again, or it is another cluster's. {advice}"
            )


class TopicOffsets(Partitions):
    """The partitions' first and end offsets at the time of the plan, and their shares of a batch."""

    def __init__(self, source: Kafka, topic: "Topic") -> None:
        self._source = source
        self._topic = topic
        self._first = topic.offsets("earliest")
        self._ends = topic.offsets("latest")
        self._shares: dict[str, int] = {}
        # By partition and what its slice says of its end, as far as is known: how the log was cut before it; None: it was not.
        self._cuts: dict[tuple[object, ...], str | PartitionUnavailable | None] = {}

    def names(self) -> list[str]:
        """Return the partitions' numbers, as texts."""
        return [str(partition) for partition in self._topic.partitions]

    def starts(self) -> dict[str, int]:
        """Return the offset of the source's start in each partition.

        Raises: SourceUnavailable if a partition does not answer.
        """
        start, starts = self._source.start, {}
        if isinstance(start, datetime):
            # Rounded up, to exclude records before it. No record is from before 1970: to Kafka, -1 means the end.
            moment = max(-((EPOCH - start) // timedelta(milliseconds=1)), 0)
            offsets = self._topic.offsets(moment)
        else:
            offsets = self._first if start == "earliest" else self._ends
        for name in self.names():
            offset = offsets[int(name)]
            try:
                if isinstance(offset, PartitionUnavailable):
                    raise offset
                # -1: no record is that recent, so the partition starts at its end
                starts[name] = offset if offset >= 0 else self._bounds(name)[1]
                if isinstance(end := self._ends[int(name)], int):  # a record that came after the look may be the first
                    self._ends[int(name)] = max(end, starts[name])
            except PartitionUnavailable as missing:
                raise SourceUnavailable(f"{missing} The first batch needs all, to know where each of them starts.") from missing
        return starts

    def share(self, before: Mapping[str, SourceMetadata]) -> None:
        """Divide a batch's `max_records` among the partitions, given their last slices; ask whether what was read is there.

        Expired records that fail their batch are planned first and alone, so that skipping it skips nothing else.
        """
        lags, expired = {}, {}
        for name in self.names():
            try:
                first, end = self._bounds(name)
            except PartitionUnavailable:
                continue  # next_slice raises it
            position = before.get(name, UNREAD)["end"]
            if position < first:
                expired[name] = first - position
            lags[name] = max(end - max(position, first), 0)
        fails = expired and self._source.when_expired == "fail"
        self._shares = expired if fails else fair_shares(lags, self._source.max_records)
        self._find_cuts(before)

    def next_slice(self, partition: str, previous: SourceMetadata | None) -> SourceMetadata | None:
        """Return the partition's share, right after its previous slice.

        Raises: PartitionUnavailable; SourceChanged if the partition ends before the previous slice.
        """
        position = (previous or UNREAD)["end"]
        first, end = self._bounds(partition)
        if end < position:
            raise SourceChanged(
                f"Partition {partition} of topic {self._topic.name} ends at offset {end}, but was planned up to {position}: "
                "its brokers have lost records. What is produced now gets their offsets, and would never be read. Produce "
                "what is missing again. A further generation would read the topic from its first record, and count again what "
                "has counted and is left."
            )
        self._check_not_cut(partition, previous or UNREAD)
        share = self._shares.get(partition, 0)
        epoch = self.epoch_of(partition)
        if self._source.when_expired == "continue" and position < first:
            logger.warning(
                "Partition %s of topic %s: %d records, offsets %d to %d, expired before they were read, and are given up.",
                *(partition, self._topic.name, first - position, position, first),
            )
            return {"start": first, "end": first + share, "lost": [position, first], **epoch}
        return {"start": position, "end": position + share, **epoch} if share else None

    def epoch_of(self, partition: str) -> SourceMetadata:
        """Return what the metadata keep of the leader epoch up to which a partition is planned; nothing if Kafka says none."""
        epoch = self._topic.leader_epochs.get(int(partition))
        return {} if epoch is None else {LEADER_EPOCH: epoch}

    def identified(self, planned: SourceMetadata) -> SourceMetadata:
        """Return metadata whose slices name the record before their ends, unless it has expired.

        Raises: SourceChanged, PartitionUnavailable.
        """
        new = {n: s for n, s in last_slices(planned).items() if LAST_RECORD not in s and self._is_left(n, s["end"])}
        found = with_last_records(self._topic, new) if new else {}
        self._cuts |= {_end_of(name, each): None for name, each in found.items()}
        return {**planned, **{part: {n: found.get(n, s) for n, s in planned[part].items()} for part in ("partitions", "idle")}}

    def _find_cuts(self, before: Mapping[str, SourceMetadata]) -> None:
        """Ask which partitions were cut before the ends of their last slices.

        Nothing is left to compare once all has expired, and nothing is passed over while nothing new has come.
        """
        asked = {}
        for name, last in before.items():
            grown, epoch = self._ends.get(int(name)) != last["end"], self._topic.leader_epochs.get(int(name))
            is_same = not grown and epoch == last.get(LEADER_EPOCH)
            if not is_same and self._is_left(name, last["end"]) and _end_of(name, last) not in self._cuts:
                asked[name] = last
        found = losses(self._topic, asked) if asked else {}
        self._cuts |= {_end_of(name, last): found[name] for name, last in asked.items()}

    def _is_left(self, name: str, end: int) -> bool:
        """Return whether records before an offset, which the partition has reached, have not expired."""
        first, last = self._first.get(int(name)), self._ends.get(int(name))
        return isinstance(first, int) and isinstance(last, int) and first < end <= last

    def _check_not_cut(self, partition: str, previous: SourceMetadata) -> None:
        """Refuse a partition whose records before the position are others than those that were planned."""
        position = previous["end"]
        cut = self._cuts.get(_end_of(partition, previous))
        if cut is None:
            return
        if isinstance(cut, PartitionUnavailable):
            raise cut
        raise SourceChanged(
            f"Partition {partition} of topic {self._topic.name} was planned up to offset {position}, and its brokers have lost "
            f"records before that since: {cut}. Other records have those offsets now, and would never be read. "
            "Copy all that was produced after the loss into a new topic, let producers go on there, and declare it here, "
            f"with generation={self._source.generation + 1}; raise the pipeline's version."
        )

    def _bounds(self, partition: str) -> tuple[int, int]:
        """Return the first offset that has not expired, and the end."""
        first, end = self._first[int(partition)], self._ends[int(partition)]
        for unavailable in (first, end):
            if isinstance(unavailable, PartitionUnavailable):
                raise unavailable
        assert isinstance(first, int)
        assert isinstance(end, int)
        return first, end


def fair_shares(lags: Mapping[str, int], most: int) -> dict[str, int]:
    """Divide at most `most` records in proportion to the lags, at least one for each.

    If more partitions lag than that, those with the longest lags get one record each, so that none waits for ever.
    """
    lagging = sorted((name for name, lag in lags.items() if lag), key=lambda name: (lags[name], int(name)))[-most:]
    shares, room, total = {}, most, sum(lags[name] for name in lagging)
    for name in lagging:  # the shortest lag first, so that the longest makes up for rounding
        shares[name] = lags[name] if total <= room else max(1, lags[name] * room // total)
        room, total = room - shares[name], total - lags[name]
    return shares


def _end_of(name: str, last: SourceMetadata) -> tuple[object, ...]:
    """Return what a slice says of the end of its partition's log before it."""
    return (name, last["end"], last.get(LEADER_EPOCH), last.get(LAST_RECORD, ""))


def _first_offset(planned: SourceMetadata) -> int:
    """Return where a slice begins, with the records before it that have expired unread."""
    begin: int = planned.get("lost", [planned["start"]])[0]
    return begin
