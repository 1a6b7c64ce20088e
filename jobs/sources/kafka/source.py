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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tidegate.jobs.sources import Dataset, Source
from tidegate.jobs.sources.partitioned import last_slices
from tidegate.state_store.base.errors import SourceUnreadable, skip_command
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

if TYPE_CHECKING:
    from tidegate.jobs.sources.kafka.topic import Topic
    from tidegate.state_store.attempt.attempts import Attempt

logger = logging.getLogger(__name__)

TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
Kind = Literal["transactional", "opaque"]
WhenExpired = Literal["fail", "continue"]


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
        for name, choice, choices in (("kind", self.kind, Kind), ("when_expired", self.when_expired, WhenExpired)):
            if choice not in get_args(choices):
                raise ValueError(f"{me} has {name}={choice!r}; use one of {', '.join(get_args(choices))}.")
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
                f'Use kind="opaque", or leave when_expired out; an expired batch is then given up by: {skip_command()}'
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

    def held_back(self, settings: Settings) -> str | None:
        """Return which records wait for transactions that are open; a producer that is gone may have left one.

        Raises: SourceUnavailable, SourceUnreadable, SettingsInvalid.
        """
        topic = self.topic_at(settings)
        ends, stable = topic.offsets("latest", is_stable=False), topic.offsets("latest")  # asked in this order: both may grow
        places = [
            f"partition {partition} from offset {start} on"
            for partition, start in stable.items()
            if isinstance(start, int) and isinstance(end := ends[partition], int) and start < end
        ]
        if not places:
            return None
        return (
            f"Topic {self.topic}: records wait for a transaction that is open: {', '.join(places)}. If its producer is gone "
            "for good, Kafka's own tool ends it: kafka-transactions.sh, find-hanging and abort."
        )

    def datasets(self, metadata: SourceMetadata, settings: Settings) -> Sequence[Dataset]:
        """Return the topic, under the address of the first configured broker."""
        del metadata
        first = (self.settings_at(settings).kafka_bootstrap or "").split(",")[0].strip()
        return [Dataset(f"kafka://{first}", self.topic)] if first else []

    def check_not_compacted(self, topic: "Topic") -> None:
        """Refuse a topic that keeps fewer records than were planned, if each attempt has to read the same.

        Raises: SourceUnreadable.
        """
        if self.kind == "transactional" and topic.is_compacted():
            raise SourceUnreadable(
                f"Topic {self.topic} is compacted: a replay of a batch may find fewer records, so it cannot be a "
                'transactional source. Declare kind="opaque" and gaps=True; or, as a commit fixes the kind, give the topic '
                "another cleanup.policy."
            )

    def ack(self, attempt: "Attempt", settings: Settings) -> None:
        """Commit the batch's end offsets for the consumer group, for lag tools; later offsets stay.

        Kafka cannot compare and set: after two calls at once, the lower offsets may stay until the next ack.
        """
        metadata = attempt.source_metadata
        ends = {int(name): last["end"] for name, last in last_slices(metadata).items()}
        topic, group = self.topic_at(settings), self.group or f"tidegate-{attempt.pipeline}"
        if not topic.is_topic_of(metadata):
            logger.info("%s: the topic was created again since; no offsets are committed for group %s.", attempt, group)
            return
        topic.commit_ahead(group, ends)

    def has_rows(self, metadata: SourceMetadata) -> bool:
        """Return whether the batch has offsets; the first one may only fix where the source starts."""
        return any(planned["end"] > planned["start"] for planned in metadata["partitions"].values())

    def settings_at(self, settings: Settings) -> Settings:
        """Return the settings with what the source overrides of them."""
        changes: dict[str, Any] = {"kafka_bootstrap": self.bootstrap} if self.bootstrap else {}
        if self.properties_file:
            changes["kafka_properties_file"] = settings.home / Path(self.properties_file).expanduser()
        return replace(settings, **changes)

    def topic_at(self, settings: Settings) -> "Topic":
        """Return the topic as its brokers have it."""
        from tidegate.jobs.sources.kafka.topic import Topic  # noqa: PLC0415 - declaring a pipeline must not load librdkafka

        return Topic(self.topic, self.settings_at(settings))
