"""Asks the brokers about one topic: partitions, offsets, a group's commits, its id, and what is right before a position.

It needs librdkafka's client, so code that plans, reads or acknowledges imports it, and declarations never do.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import cached_property
from hashlib import sha256
from time import monotonic, sleep
from typing import Any, Literal

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec  # type: ignore[attr-defined]

from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.jobs.spark.library_internals import refusals_of_kafka_client
from tidegate.state_store.base.errors import (
    PartitionUnavailable,
    SettingsInvalid,
    SourceChanged,
    SourceUnavailable,
    SourceUnreadable,
    TidegateError,
)
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

logger = logging.getLogger(__name__)

# Long enough for a broker's restart; retries of plan and attempt bridge a longer absence.
ANSWER_SECONDS = 15
POLL_SECONDS = 0.05
DIGEST_CHARACTERS = 16  # a topic may have thousands of partitions, and each batch names a record of each
# Errors that a retry cannot fix.
REFUSALS = (
    *refusals_of_kafka_client(),
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)
# Errors of a consumer group that was not used for a while: Kafka is still finding or loading the group's coordinator.
NO_COORDINATOR = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)


class Topic:
    """A topic of one cluster. Each call asks the brokers, except for the description, which is read once."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self._settings = settings
        self._brokers = settings.kafka_bootstrap
        self._errors: list[KafkaError] = []
        # By partition: the leader epoch of the end that was asked for last. Each leader writes under a higher one; some
        # services keep none.
        self.leader_epochs: dict[int, int | None] = {}
        # log_level: otherwise the client writes each refused connection to standard error.
        self._configuration: dict[str, Any] = {**kafka_client(settings), "log_level": 0, "error_cb": self._errors.append}
        try:
            self._client = AdminClient(self._configuration)
        except (KafkaException, ValueError) as error:
            raise SettingsInvalid(f"The Kafka properties cannot be used: {error}.") from error

    @property
    def id(self) -> str:
        """Return the cluster's id of this topic; a later topic of the same name has another id."""
        return str(self._description.topic_id)

    def named(self, name: str) -> "Topic":
        """Return another topic of the same cluster."""
        return Topic(name, self._settings)

    def is_topic_of(self, metadata: SourceMetadata) -> bool:
        """Return whether a batch was planned from this topic, and not from an earlier one of its name or another cluster's."""
        return bool(self.id == metadata["topic_id"])

    def is_still_topic_of(self, metadata: SourceMetadata) -> bool:
        """Return whether the topic from which a batch was planned still exists."""
        (answer,) = self._ask(self._describe()).values()
        if isinstance(answer, KafkaError) and answer.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return False
        return self.is_topic_of(metadata)

    @property
    def partitions(self) -> list[int]:
        """Return the numbers of the topic's partitions, with or without a leader."""
        return sorted(partition.id for partition in self._description.partitions)

    def is_compacted(self) -> bool | None:
        """Return whether later records replace earlier ones with the same key; None if Kafka refuses to say."""
        topic = ConfigResource(ConfigResource.Type.TOPIC, self.name)
        try:
            configuration = self._answer(self._client.describe_configs([topic], request_timeout=ANSWER_SECONDS))
        except SourceUnreadable as refused:
            logger.info("Whether topic %s is compacted is not known: %s", self.name, refused)
            return None
        return "compact" in configuration["cleanup.policy"].value

    def offsets(
        self, of: "Literal['earliest', 'latest'] | int", *, is_stable: bool = True
    ) -> dict[int, int | PartitionUnavailable]:
        """Return each partition's first offset, last stable offset, or first offset at or after a time in milliseconds.

        The last stable offset is the start of the first open transaction, else the end; without `is_stable` it is the end. A
        partition that does not answer has an error instead of an offset, and one without a record that recent has -1.
        """
        ends: dict[str, Callable[[], OffsetSpec]] = {"earliest": OffsetSpec.earliest, "latest": OffsetSpec.latest}
        spec = OffsetSpec.for_timestamp(of) if isinstance(of, int) else ends[of]()
        led = [partition.id for partition in self._description.partitions if partition.leader is not None]
        answers = self._ask(
            self._client.list_offsets(
                {TopicPartition(self.name, partition): spec for partition in led},
                isolation_level=IsolationLevel.READ_COMMITTED if is_stable else IsolationLevel.READ_UNCOMMITTED,
                request_timeout=ANSWER_SECONDS,
            )
            if led
            else {}
        )
        by_partition = {requested.partition: answer for requested, answer in answers.items()}
        if of == "latest":
            answered = by_partition.items()
            self.leader_epochs = {partition: getattr(answer, "leader_epoch", None) for partition, answer in answered}
        return {partition: self._offset(partition, by_partition.get(partition)) for partition in self.partitions}

    def last_records(
        self, positions: Mapping[int, tuple[int, int | None]]
    ) -> dict[int, str | SourceChanged | PartitionUnavailable | None]:
        """Return the digest of the record right before each position; None where that offset has no record.

        A position is an offset and the leader epoch in which the log had it, if that is known. What was written after a log was
        cut has taken the offsets of what was lost, so that the end of the log alone does not show the loss: the record is
        another one, or the partition has SourceChanged, with Kafka's words for the cut. One that does not answer has an error.

        Raises: SourceUnreadable.
        """
        asked = [
            TopicPartition(self.name, each, at - 1, leader_epoch=-1 if epoch is None else epoch)
            for each, (at, epoch) in positions.items()
        ]
        # The client asks the leader where the epoch ends now (KIP-320), before it reads from the position.
        self._reader.assign(asked)
        self._reader.resume(asked)
        deadline = monotonic() + ANSWER_SECONDS
        answers: dict[int, str | SourceChanged | PartitionUnavailable | None] = {}
        while len(answers) < len(positions) and monotonic() < deadline:
            answer = self._reader.poll(POLL_SECONDS)
            if answer is not None and answer.partition() not in answers:
                answers |= self._answered(answer, positions)
        self._reader.unassign()
        silent = "Partition {} of topic {} does not show what is right before its position."
        return {each: answers.get(each, PartitionUnavailable(silent.format(each, self.name))) for each in positions}

    def _answered(
        self, answer: Message, positions: Mapping[int, tuple[int, int | None]]
    ) -> dict[int, str | SourceChanged | PartitionUnavailable | None]:
        """Return what an answer says of its partition, if it says something of one."""
        error, partition = answer.error(), answer.partition()
        if error is not None and error.code() in REFUSALS and error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
            raise self._meaning(error)
        if partition is None or partition not in positions:
            return {}
        if error is not None and error.code() == KafkaError._AUTO_OFFSET_RESET:
            return {partition: SourceChanged(str(error.str()))}
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            return {}
        self._reader.pause([TopicPartition(self.name, partition)])  # no more of its records are wanted
        is_there = error is None and answer.offset() == positions[partition][0] - 1
        return {partition: _digest(answer) if is_there else None}

    @cached_property
    def _reader(self) -> Consumer:
        """A consumer that commits nothing, and belongs to no group but by name."""
        checks: dict[str, Any] = {"auto.offset.reset": "error", "enable.partition.eof": True, "enable.auto.commit": False}
        quick = {"group.id": "tidegate-position", "isolation.level": "read_uncommitted", "fetch.wait.max.ms": 10}
        return Consumer({**self._configuration, **checks, **quick})

    def commit_ahead(self, group: str, ends: Mapping[int, int]) -> None:
        """Commit offsets for a consumer group, except for partitions where it has committed later ones."""
        # The admin client's calls can end the process while the group's coordinator is being found, so a consumer commits.
        consumer = Consumer({**self._configuration, "group.id": group, "enable.auto.commit": False})
        deadline = monotonic() + ANSWER_SECONDS
        try:
            while (refused := self._try_commit(consumer, ends)) is not None:
                if refused.code() not in NO_COORDINATOR or monotonic() > deadline:
                    raise self._meaning(refused)
                sleep(POLL_SECONDS)
        finally:
            consumer.close()

    def _try_commit(self, consumer: Consumer, ends: Mapping[int, int]) -> KafkaError | None:
        try:
            current = consumer.committed([TopicPartition(self.name, partition) for partition in ends], timeout=ANSWER_SECONDS)
            if unknown := next((partition.error for partition in current if partition.error), None):
                return unknown
            ahead = [
                TopicPartition(self.name, committed.partition, ends[committed.partition])
                for committed in current
                if committed.offset < ends[committed.partition]  # negative where nothing is committed
            ]
            results = consumer.commit(offsets=ahead, asynchronous=False) if ahead else []
        except KafkaException as error:
            refused: KafkaError = error.args[0]
            return refused
        return next((partition.error for partition in results if partition.error), None)

    @cached_property
    def _description(self) -> Any:
        return self._answer(self._describe())

    def _describe(self) -> "Mapping[Any, Future[Any]]":
        return self._client.describe_topics(TopicCollection([self.name]), request_timeout=ANSWER_SECONDS)

    def _offset(self, partition: int, answer: Any) -> int | PartitionUnavailable:
        if isinstance(answer, KafkaError):
            return PartitionUnavailable(f"Partition {partition} of topic {self.name} does not answer: {answer.str()}.")
        if answer is None:
            return PartitionUnavailable(f"Partition {partition} of topic {self.name} has no leader.")
        return int(answer.offset)

    def _answer(self, futures: "Mapping[Any, Future[Any]]") -> Any:
        """Return a single answer; raise its error."""
        (answer,) = self._ask(futures).values()
        if isinstance(answer, KafkaError):
            raise self._meaning(answer)
        return answer

    def _ask(self, futures: "Mapping[Any, Future[Any]]") -> dict[Any, Any]:
        """Return each request's answer or error; raise a refusal, such as of the log-in, at once."""
        self._wait(futures.values())
        answers: dict[Any, Any] = {}
        for requested, future in futures.items():
            try:
                answers[requested] = future.result()
            except KafkaException as error:
                answers[requested] = error.args[0]
                if answers[requested].code() in REFUSALS:
                    raise self._meaning(answers[requested]) from error
        return answers

    def _wait(self, futures: "Collection[Future[Any]]") -> None:
        deadline = monotonic() + ANSWER_SECONDS + 1  # the client itself gives up earlier
        while not all(future.done() for future in futures):
            self._client.poll(POLL_SECONDS)
            if refused := next((error for error in self._errors if error.code() in REFUSALS), None):
                raise self._meaning(refused)
            if monotonic() > deadline:
                raise SourceUnavailable(f"Kafka at {self._brokers} does not answer.")

    def _meaning(self, error: KafkaError) -> TidegateError:
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return SourceUnreadable(f"Kafka at {self._brokers} has no topic {self.name}. Create it, or correct its name.")
        if error.code() in REFUSALS:
            return SourceUnreadable(f"Kafka at {self._brokers} refuses us: {error.str()}. See: tidegate settings")
        because = f" ({self._errors[-1].str()})" if self._errors else ""
        return SourceUnavailable(f"Kafka at {self._brokers} does not answer for topic {self.name}: {error.str()}{because}.")


def _digest(record: Message) -> str:
    """Return what identifies a record among all that may ever have its offset: content and time."""
    key, value = record.key(), record.value()
    return sha256(repr((record.timestamp(), key, value)).encode()).hexdigest()[:DIGEST_CHARACTERS]
