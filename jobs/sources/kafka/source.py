"""A source that reads one Kafka topic, transactional or opaque.

A batch is a range of offsets for each partition, `end` not included; nothing else is read:

    {"topic": name, "topic_id": id, "partitions": {"0": {"start": 5, "end": 9}}, "idle": {"1": {"start": 3, "end": 3}},
     "generation": 1}

`partitions` has the ranges that the batch reads, `idle` the last ranges of the other partitions. Offsets number a topic's
records permanently, so a range that was delivered whole is the same records each time; complete delivery is checked. The
topic's id detects a topic that was deleted and created again. Positions come from the ledger alone: a consumer group's
committed offsets are for lag tools and never read as a position.

Records that expire before they are read are never passed over silently. Their offsets become a batch of their own, which
fails with RangeExpired: there is a txid to inspect and, by an operator's decision, to skip; or, if an opaque source declares
it beforehand, the next range starts after them and records it: ``"lost": [5, 7]``.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from jobs.sources import Dataset, History, Source
from jobs.sources.partitioned import PartitionedCoordinator, Partitions
from state_store.declaration import SourceMetadata
from state_store.errors import PartitionUnavailable, RangeExpired, SourceChanged, SourceUnavailable, SourceUnreadable
from state_store.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from jobs.sources.kafka.read import KafkaReader
    from jobs.sources.kafka.topic import Topic
    from state_store.attempts import Attempt

logger = logging.getLogger(__name__)

TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Kind = Literal["transactional", "opaque"]
WhenExpired = Literal["fail", "continue"]
# The position of a partition that has appeared since the last batch: none of it was read.
UNREAD = {"start": 0, "end": 0}
OF_ANOTHER_SOURCE = (
    "The batch was planned from another source than a topic. Declare that one until the batch has committed, or give the batch "
    "up: tidegate skip."
)


@dataclass(frozen=True)
class Kafka(Source):
    """The records of a topic, each read exactly once; within a partition in the order of their offsets.

    `start` is where the first batch begins: "earliest", "latest" (records produced after the first plan) or a time with its
    zone (the first record of each partition at or after it). Partitions that are added to the topic later are read from
    their first record. A batch has at most `max_records` offsets, divided among partitions in proportion to their lags.

    Rows have the columns key and value (binary), topic, partition, offset and timestamp, and headers if `headers` is set.
    Only committed records of transactional producers are read, and none after the first transaction that is still open:
    `tidegate why` says which records wait for one.

    When a partition cannot be reached, a transactional source stops until it can; an opaque source reads the others.

    `gaps` declares that not every offset is a record, as with transactional producers, whose commits take offsets, and with
    compacted topics. Then reading checks that nothing outside the range was delivered and nothing of it has expired, but not
    that each offset was delivered. Compaction removes records between two attempts, so such a topic has to be an opaque
    source.

    `when_expired="continue"`, for opaque sources, gives up records that expired unread, with a warning and a note in the
    batch's metadata. `group` is the consumer group under which lag tools see committed positions, by default
    ``tidegate-<pipeline>``. `bootstrap` and `properties_file` override the settings kafka_bootstrap and
    kafka_properties_file; a relative path starts at the project folder.

    A topic that was deleted and created again is refused: positions in the old topic mean nothing in it. To continue with the
    same states, raise `generation`, and the pipeline's version: the topic, perhaps under another name, is then read from its
    first record, regardless of `start`. Batches of the old topic that were planned and have not committed are still read from
    it; if it is gone they have to be skipped, or an opaque source that plans one again gives its records up, with a warning and
    a note in the batch's metadata.
    """

    topic: str
    kind: Kind = "transactional"
    start: Literal["earliest", "latest"] | datetime = "earliest"
    max_records: int = 1_000_000
    gaps: bool = False
    headers: bool = False
    when_expired: WhenExpired = "fail"
    group: str | None = None
    bootstrap: str | None = None
    properties_file: str | None = None
    generation: int = 1

    def __post_init__(self) -> None:
        me = f"Kafka({self.topic!r})"
        if not TOPIC.fullmatch(self.topic) or self.topic in {".", ".."}:
            raise ValueError(f"{me} is no topic: its name has up to 249 letters, digits, dots, - and _.")
        for name, chosen, choice in (("kind", self.kind, Kind), ("when_expired", self.when_expired, WhenExpired)):
            if chosen not in get_args(choice):
                raise ValueError(f"{me} has {name}={chosen!r}; use one of {', '.join(get_args(choice))}.")
        if isinstance(self.start, datetime):
            if self.start.tzinfo is None:
                raise ValueError(f"{me} starts at {self.start}, which is another moment in each time zone. Add tzinfo.")
        elif self.start not in {"earliest", "latest"}:
            raise ValueError(f'{me} cannot start at {self.start!r}: use "earliest", "latest" or a datetime with a time zone.')
        for name, value in (("max_records", self.max_records), ("generation", self.generation)):
            if value < 1:
                raise ValueError(f"{me} has {name}={value}; it must be at least 1.")
        if self.when_expired == "continue" and self.kind != "opaque":
            raise ValueError(
                f"{me} cannot continue without expired records: a transactional source leaves none out. "
                'Use kind="opaque", or leave when_expired out; an expired batch is then given up by: tidegate skip'
            )
        if self.group == "":
            raise ValueError(f"{me} cannot commit for a group without a name. Leave group out.")

    @property
    def identity(self) -> str:
        """Return what identifies the rows: topic, start and columns.

        Brokers are not part of it, because they may move: the topic's id in the metadata detects another cluster's topic.
        """
        start = self.start.astimezone(UTC).isoformat() if isinstance(self.start, datetime) else self.start
        generation = [self.generation] if self.generation > 1 else []
        return f"kafka {json.dumps([self.topic, start, self.headers, *generation])}"

    def coordinator(self, settings: Settings) -> "KafkaCoordinator":
        """Ask once where each partition begins and ends, and return a coordinator for these ranges.

        Raises: SourceUnavailable (the brokers are away), SourceUnreadable (they refuse us, have no such topic, or compact it),
        SettingsInvalid.
        """
        topic = self._topic(settings)
        if self.kind == "transactional" and topic.is_compacted():
            raise SourceUnreadable(
                f"Topic {self.topic} is compacted: a replay of a batch may find fewer records, so it cannot be a transactional "
                'source. Declare kind="opaque" and gaps=True; or, as a commit fixes the kind, give the topic another '
                "cleanup.policy."
            )
        return KafkaCoordinator(self, topic)

    def emitter(self, spark: "SparkSession", settings: Settings) -> "KafkaReader":
        """Return a reader of the ranges in the metadata."""
        from jobs.sources.kafka.read import KafkaReader  # noqa: PLC0415 - declaring a pipeline must not load it

        return KafkaReader(spark, self, self._located(settings))

    def held_back(self, settings: Settings) -> str | None:
        """Return which records wait for transactions that are open; a producer that is gone for good may have left one.

        Raises: SourceUnavailable, SourceUnreadable, SettingsInvalid.
        """
        topic = self._topic(settings)
        ends, stable = topic.offsets("latest", is_stable=False), topic.offsets("latest")  # asked in this order: both may grow
        held = [
            f"partition {partition} from offset {start} on"
            for partition, start in stable.items()
            if isinstance(start, int) and isinstance(end := ends[partition], int) and start < end
        ]
        if not held:
            return None
        return (
            f"Topic {self.topic}: records wait for a transaction that is open: {', '.join(held)}. If its producer is gone "
            "for good, Kafka's own tool ends it: kafka-transactions.sh, find-hanging and abort."
        )

    def datasets(self, metadata: SourceMetadata, settings: Settings) -> Sequence[Dataset]:
        """Return the topic, under the address of the first configured broker."""
        del metadata
        first = (self._located(settings).kafka_bootstrap or "").split(",")[0].strip()
        return [Dataset(f"kafka://{first}", self.topic)] if first else []

    def ack(self, attempt: "Attempt", settings: Settings) -> None:
        """Commit the batch's end offsets for the consumer group, for lag tools; later offsets stay.

        Kafka cannot compare and set: after two calls at once, the lower offsets may stay until the next ack.
        """
        metadata = attempt.source_metadata
        ends = {int(name): known["end"] for name, known in _standing(metadata).items()}
        topic, group = self._topic(settings), self.group or f"tidegate-{attempt.pipeline}"
        if topic.id != metadata["topic_id"]:
            logger.info("%s: the topic was created again since; no offsets are committed for group %s.", attempt, group)
            return
        topic.commit_ahead(group, ends)

    def has_rows(self, metadata: SourceMetadata) -> bool:
        """Return whether the batch has offsets; the first one may only fix where the source starts."""
        return any(known["end"] > known["start"] for known in metadata["partitions"].values())

    def _located(self, settings: Settings) -> Settings:
        changes: dict[str, Any] = {"kafka_bootstrap": self.bootstrap} if self.bootstrap else {}
        if self.properties_file:
            changes["kafka_properties_file"] = settings.home / Path(self.properties_file).expanduser()
        return replace(settings, **changes)

    def _topic(self, settings: Settings) -> "Topic":
        from jobs.sources.kafka.topic import Topic  # noqa: PLC0415 - declaring a pipeline must not load librdkafka

        return Topic(self.topic, self._located(settings))


class KafkaCoordinator(PartitionedCoordinator):
    """Plans batches from the offsets that one look at the topic has found."""

    def __init__(self, source: Kafka, topic: "Topic") -> None:
        self._source = source
        self._topic = topic
        self._look = TopicLook(source, topic)
        self._history: History | None = None
        super().__init__(source.kind, self._look)

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
        if current_metadata is not None and (kept := self._kept(previous_metadata, current_metadata)) is not None:
            return kept
        saved = previous_metadata or current_metadata
        is_new = saved is not None and self._begins_again(saved)
        self._check_same_topic(current_metadata if is_new else saved)
        if is_new:
            positions, must_exist = {}, current_metadata is not None
            previous_metadata = {"partitions": {}, "idle": {}}
        elif previous_metadata is None:
            positions = self._starts(current_metadata)
            previous_metadata = {"partitions": {}, "idle": positions}
            must_exist = self._source.start == "latest" or current_metadata is not None
        else:
            positions, must_exist = _standing(previous_metadata), False
        self._look.share({name: known["end"] for name, known in positions.items()})
        planned = super().initialize_transaction(txid, previous_metadata, current_metadata)
        if planned is None:
            if not must_exist:
                return None
            planned = previous_metadata
        place = {"topic": self._topic.name, "topic_id": self._topic.id, "generation": self._source.generation}
        planned = {**planned, **self._given_up(txid, current_metadata), **place}
        self._check_redo(txid, current_metadata, planned)
        return planned

    def _check_redo(self, txid: int, counted: SourceMetadata | None, planned: SourceMetadata) -> None:
        """Refuse to plan a committed batch again without records that have counted in it, and that no later batch can read.

        Raises: RangeExpired.
        """
        if counted is None or self._history is None or self._history.committed() < txid:
            return
        gone: list[str] = []
        for name, read in counted["partitions"].items():
            first = read["end"] if "given_up" in planned else _standing(planned).get(name, UNREAD)["start"]
            if read["start"] < (until := min(first, read["end"])):
                gone.append(f"partition {name}, offsets {read['start']} to {until}")
        if gone:
            raise RangeExpired(
                f"Records of topic {counted['topic']} have counted in txid {txid} and are gone: {'; '.join(gone)}. To redo the "
                "batch would take them away. Correct it by a later batch."
            )

    def _kept(self, previous: SourceMetadata | None, current: SourceMetadata) -> SourceMetadata | None:
        """Return what a planned batch keeps of its plan; None if it is planned again.

        Raises: SourceChanged if it was planned from another source.
        """
        if self._source.kind == "transactional":
            return current
        if "topic_id" not in current:
            raise SourceChanged(OF_ANOTHER_SOURCE)
        return self._rest_of_earlier(previous, current)

    def _rest_of_earlier(self, previous: SourceMetadata | None, current: SourceMetadata) -> SourceMetadata | None:
        """Return what a batch still has to read of an earlier generation, in which it was planned: up to its planned ends.

        None if it was not, if that topic is gone or is read again, or if the batch before has gone on to a later generation.
        """
        generation = current.get("generation", 1)
        before = previous.get("generation", 1) if previous and "topic_id" in previous else 0
        if not before <= generation < self._source.generation or current["topic_id"] == self._topic.id:
            return None
        if not self._topic.named(current["topic"]).is_still(current["topic_id"]):
            return None
        known = _standing(previous) if previous and before == generation else self._starts(current)
        rest = {
            name: planned if start == _begin_of(planned) else {"start": start, "end": planned["end"]}
            for name, planned in _standing(current).items()
            if (start := known.get(name, UNREAD)["end"]) < planned["end"]
        }
        idle = {name: last for name, last in known.items() if name not in rest}
        return {**current, "partitions": rest, "idle": idle}

    def _given_up(self, txid: int, current: SourceMetadata | None) -> SourceMetadata:
        """Return a note on the records of a topic that is gone, from which a batch was planned in an earlier generation."""
        is_earlier = current is not None and current.get("generation", 1) < self._source.generation
        if current is None or not is_earlier or current["topic_id"] == self._topic.id:
            return {}
        left = {name: current[name] for name in ("topic", "topic_id", "partitions")}
        logger.warning("Batch %d was planned from a topic that is gone; its records are given up: %s", txid, json.dumps(left))
        return {"given_up": left}

    def _begins_again(self, saved: SourceMetadata) -> bool:
        """Return whether the author has declared a newer generation, in which another topic follows the saved one."""
        before, now = saved.get("generation", 1), self._source.generation
        if "topic_id" not in saved and before >= now:
            raise SourceChanged(
                f"The batches so far are from another source, which says nothing of where topic {self._topic.name} stands. To "
                f"read it from its first record, with the same states, declare generation={before + 1} in the Kafka source."
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
            starts = self._look.starts()
        else:
            planned = _standing(first_metadata)
            starts = {name: _begin_of(known) for name, known in planned.items()}
        return {name: {"start": start, "end": start} for name, start in starts.items()}

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
        if saved["topic_id"] != self._topic.id:
            raise SourceChanged(
                f"Topic {self._topic.name} is another one than before (its id was {saved['topic_id']}, now it is "
                f"{self._topic.id}): it was deleted and created again, or it is another cluster's. {advice}"
            )


class TopicLook(Partitions):
    """The partitions' first and end offsets at the time of the plan, and their shares of a batch."""

    def __init__(self, source: Kafka, topic: "Topic") -> None:
        self._source = source
        self._topic = topic
        self._first = topic.offsets("earliest")
        self._ends = topic.offsets("latest")
        self._shares: dict[str, int] = {}

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
            found = self._topic.offsets(moment)
        else:
            found = self._first if start == "earliest" else self._ends
        for name in self.names():
            offset = found[int(name)]
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

    def share(self, positions: Mapping[str, int]) -> None:
        """Divide a batch's `max_records` among the partitions, given their positions.

        Expired records that fail their batch are planned first and alone, so that skipping it skips nothing else.
        """
        lags, expired = {}, {}
        for name in self.names():
            try:
                first, end = self._bounds(name)
            except PartitionUnavailable:
                continue  # next_slice raises it
            position = positions.get(name, UNREAD["end"])
            if position < first:
                expired[name] = first - position
            lags[name] = max(end - max(position, first), 0)
        fails = expired and self._source.when_expired == "fail"
        self._shares = expired if fails else fair_shares(lags, self._source.max_records)

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
        share = self._shares.get(partition, 0)
        if self._source.when_expired == "continue" and position < first:
            logger.warning(
                "Partition %s of topic %s: %d records, offsets %d to %d, expired before they were read, and are given up.",
                *(partition, self._topic.name, first - position, position, first),
            )
            return {"start": first, "end": first + share, "lost": [position, first]}
        return {"start": position, "end": position + share} if share else None

    def _bounds(self, partition: str) -> tuple[int, int]:
        """Return the first offset that has not expired, and the end.

        Raises: PartitionUnavailable.
        """
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
    shares, left, total = {}, most, sum(lags[name] for name in lagging)
    for name in lagging:  # the shortest lag first, so that the longest makes up for rounding
        shares[name] = lags[name] if total <= left else max(1, lags[name] * left // total)
        left, total = left - shares[name], total - lags[name]
    return shares


def _begin_of(planned: SourceMetadata) -> int:
    """Return where a slice begins, with the records before it that have expired unread."""
    begin: int = planned.get("lost", [planned["start"]])[0]
    return begin


def _standing(metadata: SourceMetadata) -> dict[str, SourceMetadata]:
    """Return the last slice of every known partition."""
    return {**metadata["idle"], **metadata["partitions"]}
