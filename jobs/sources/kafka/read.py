"""Reads the ranges of one batch with Spark's Kafka source, and checks that none has expired and all came whole.

Spark has to fail when it misses records (failOnDataLoss); this module counts the records as well, when Spark first computes the
rows. A pipeline with several states computes them once per state: the later computations rest on Spark's own check, on the
sums of row hashes, and on the check after the read that no record has expired.

Passwords stay out of Spark's plan: it names the file that holds them, and Spark's Kafka clients read the file. The file has to
be at the same place for this process, for Spark's server and for its executors.
"""

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from pyspark.sql import Observation
from pyspark.sql import functions as F

from tidegate.jobs.sources import OF_ANOTHER_SOURCE, ORIGIN, PAYLOAD, REFUSAL, Emitter
from tidegate.jobs.sources.column_types import columns_of
from tidegate.jobs.sources.kafka.last_records import losses
from tidegate.jobs.sources.kafka.login import kafka_client, kafka_java_client
from tidegate.jobs.sources.kafka.source import Kafka
from tidegate.jobs.sources.kafka.topic import Topic
from tidegate.state_store.base.errors import (
    BadKey,
    DeclarationInvalid,
    MalformedRecord,
    PartitionUnavailable,
    RangeExpired,
    RowsLost,
    SettingsInvalid,
    SourceChanged,
    SourceUnavailable,
    SourceUnreadable,
    SparkFailed,
    TidegateError,
    skip_command,
)
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidegate.state_store.attempt.attempts import Attempt

COLUMNS = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
}
HEADERS = {"headers": "array<struct<key: string, value: binary>>"}
FILE_PROVIDER = "org.apache.kafka.common.config.provider.FileConfigProvider"
SECRET = re.compile(r"password|secret|jaas", re.IGNORECASE)
# Long enough for a broker's restart, or a partition's new leader; Spark's default is 120 s.
POLL_MILLISECONDS = 60_000
API_MILLISECONDS = 20_000
# Several tasks read a longer range; by default Spark reads each partition of the topic in one task.
RECORDS_PER_TASK = 250_000
KAFKA_ERROR = re.compile(r"org\.apache\.kafka\.\S*?\.(\w+Exception)[):]+ ?([^\n]*)")
LOST = re.compile(r"KAFKA_DATA_LOSS|KafkaIllegalStateException")
DATA_LOSS = re.compile(r"Reason: (.*?\bwith consumer group|[^\n]*)", re.DOTALL)
FAR_TIME = re.compile(r"Record at topic (\S+) partition (\d+) offset (\d+) has timestamp value (-?\d+) that overflows")
REFUSALS = ("Authentication", "Authorization", "Config", "Sasl", "Ssl")


class KafkaReader(Emitter):
    """Reads ranges of offsets of one topic."""

    def __init__(self, spark: "SparkSession", source: Kafka, settings: Settings) -> None:
        self._spark = spark
        self._source = source
        self._settings = source.settings_at(settings)
        self._columns = {**COLUMNS, **HEADERS} if source.headers else COLUMNS
        self._attempt: Attempt | None = None
        self._delivered: Observation | None = None
        self._rows: DataFrame | None = None

    def emit_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the records of the ranges, after checking that none of them has expired."""
        self._attempt = attempt
        ranges = _ranges(metadata)
        if not ranges:
            return self._spark.createDataFrame([], self.row_schema())
        self._check_kept(attempt, metadata, Topic(metadata["topic"], self._settings))
        rows = self._spark.read.format("kafka").options(**self._options(metadata["topic"], ranges)).load()
        self._rows = rows
        # It gets a name of its own: batches share a session, and a batch may read several topics, each with its counts.
        self._delivered = Observation()
        # An expression for each partition would take longer than the read. The histogram has a bin for each, so it is exact.
        counts = F.histogram_numeric("partition", F.lit(max(2, len(ranges)))).alias("records")
        bounds = [F.array(*(F.lit(ranges.get(each, (0, 0))[side]) for each in range(max(ranges) + 1))) for side in (0, 1)]
        start, end = (F.coalesce(F.get(each, F.col("partition")), F.lit(0)) for each in bounds)
        outside = F.count(F.when((F.col("offset") < start) | (F.col("offset") >= end), 1)).alias("outside")
        return rows.select(*self._columns).observe(self._delivered, counts, outside)

    def emit_records(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the rows with their origin; no Kafka record is malformed before the transform reads it."""
        origin = F.format_string("%s partition %d offset %d", F.col("topic"), F.col("partition"), F.col("offset"))
        nothing = F.lit(None).cast("string")
        return self.emit_batch(attempt, metadata).withColumns({ORIGIN: origin, REFUSAL: nothing, PAYLOAD: nothing})

    def row_schema(self) -> str:
        """Return the columns of the rows."""
        return columns_of(self._columns)

    def verify_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> None:
        """Check that exactly the records of the ranges were delivered, that none has expired, and none is another one."""
        ranges = _ranges(metadata)
        if not ranges:
            return
        topic = Topic(metadata["topic"], self._settings)
        self._check_kept(attempt, metadata, topic)
        self._source.check_not_compacted(topic)
        self._check_not_cut(attempt, metadata, topic)
        assert self._delivered is not None
        delivered = self._delivered.get
        if "outside" not in delivered:
            raise SparkFailed(f"{attempt}: Spark did not say how many records it has read.")
        if delivered["outside"]:
            raise SourceChanged(
                f"Topic {metadata['topic']}: Spark delivered {delivered['outside']} records that were not planned."
            )
        counted: Counter[int] = Counter()
        for partition, records in delivered["records"] or ():
            counted[int(partition)] += int(records)
        for partition, (start, end) in ranges.items():
            count = counted[partition]
            where = f"Partition {partition} of topic {metadata['topic']}, offsets {start} to {end}"
            if count > end - start:  # an offset has one record
                raise RowsLost(
                    f"{where}: Spark counts {count} records in {end - start} offsets. Either it has repeated some, or the "
                    "transform reads them twice, as a join without equal columns does unless one side is marked by broadcast()."
                )
            if count < end - start and not self._source.gaps:
                assert self._rows is not None
                if count < self._rows.where(F.col("partition") == partition).count():  # by a query of its own
                    raise DeclarationInvalid(
                        f"{where}: Spark read {count} of {end - start} records, because the transform does not read all rows. "
                        "Take limit() and the like out of it: which rows they leave out is not the same each time."
                    )
                raise SourceChanged(
                    f"{where}: {end - start} records were planned, {count} delivered. If the topic is compacted, or its "
                    "producers use transactions, not every offset is a record: declare gaps=True. Otherwise its brokers have "
                    "lost some."
                )

    def _not_utf8(self) -> MalformedRecord:
        """Return the error that names the first record whose key or value is not UTF-8."""
        assert self._rows is not None
        key, value = (~F.is_valid_utf8(F.col(name).cast("string")) for name in ("key", "value"))
        wrong = self._rows.select("partition", "offset", key.alias("key"), value.alias("value")).where("key OR value")
        if (first := wrong.orderBy("partition", "offset").first()) is None:
            return MalformedRecord(
                f"The transform makes a text that is not UTF-8; all keys and values of topic {self._source.topic} are. Cut "
                "texts, not bytes."
            )
        return MalformedRecord(
            f"Topic {self._source.topic} has records that are not UTF-8, such as partition {first.partition} offset "
            f"{first.offset} ({'key' if first.key else 'value'}). In the transform, decode them as what they are, as in "
            "decode(value, 'ISO-8859-1'), or leave them out by is_valid_utf8(string(value)); or set them aside by such a check "
            "in the pipeline, with on_poison='quarantine'."
        )

    def explain(self, error: Exception) -> TidegateError | None:
        """Explain an error of Spark's Kafka source, or Postgres' error about a text that is not UTF-8."""
        text = str(error)
        if isinstance(error, BadKey) and "invalid byte sequence" in text and self._rows is not None:
            return self._not_utf8()
        if "DATA_SOURCE_NOT_FOUND" in text or "Failed to find data source: kafka" in text:
            return SourceUnreadable(
                "Spark has no Kafka source. Start the stack by: tidegate up --with kafka, or give your own Spark the package "
                "org.apache.spark:spark-sql-kafka-0-10_2.13 of its version (spark.jars.packages)."
            )
        if far := FAR_TIME.search(text):
            return MalformedRecord(
                f"Topic {far[1]} partition {far[2]} offset {far[3]} has the time {far[4]}, in milliseconds, which is out of "
                "Spark's range: its producer may have meant nanoseconds. Spark reads no range with it, so only the whole "
                "batch can be given up."
            )
        if LOST.search(text):
            reason = DATA_LOSS.search(text)
            message = reason[1].removesuffix("with consumer group").strip() if reason else text.splitlines()[0]
            return self._expired(f"Spark did not get all records of topic {self._source.topic}: {' '.join(message.split())}.")
        if "Could not read properties from file" in text:
            return SourceUnreadable(
                f"Spark cannot read {self._settings.kafka_properties_file}, where the Kafka log-in is. Put it at the same "
                "place on Spark's server and its executors, readable by them."
            )
        if "Invalid PEM" in text:
            cause = text.rpartition("Caused by: ")[2].splitlines()[0]
            return SourceUnreadable(
                f"Spark cannot use the certificate or key of {self._settings.kafka_properties_file}: {cause}. With a "
                "password, Java 17 reads a key only as openssl pkcs8 -topk8 -v1 PBE-SHA1-3DES writes it."
            )
        if (match := KAFKA_ERROR.search(text)) is None:
            return None
        name, why = match[1], match[2].strip().rstrip(".")
        if any(refusal in name for refusal in REFUSALS):
            return SourceUnreadable(f"Kafka refuses Spark: {name}: {why}. See: tidegate settings")
        return SourceUnavailable(f"Kafka did not answer Spark: {name}: {why}.")

    def _check_kept(self, attempt: "Attempt", metadata: SourceMetadata, topic: Topic) -> None:
        """Refuse expired records, and a topic that was replaced."""
        if not topic.is_topic_of(metadata):
            raise SourceChanged(
                f"Topic {topic.name} was deleted and created again since this batch was planned: its id was "
                f"{metadata['topic_id']}, now it is {topic.id}. The planned records are gone; give the batch up: "
                f"{skip_command(attempt.pipeline, attempt.txid)}"
            )
        first_left, ranges = topic.offsets("earliest"), _ranges(metadata)
        left: dict[int, tuple[int, int]] = {}
        expired: list[str] = []
        for partition, (start, end) in ranges.items():
            first = first_left[partition]
            if isinstance(first, PartitionUnavailable):
                raise first
            if first < end:
                left[partition] = (max(first, start), end)
            if first > start:
                expired.append(
                    f"Partition {partition} of topic {metadata['topic']}: of offsets {start} to {end}, "
                    f"{min(first, end) - start} have expired; the first that is left is {first}."
                )
        if expired:
            planned, readable = (sum(end - start for start, end in these.values()) for these in (ranges, left))
            where = ", ".join(f"partition {partition} from {start} to {end}" for partition, (start, end) in left.items())
            loss = f" The batch has {planned} offsets, and {readable} of them can still be read: {where}." if left else ""
            raise self._expired(" ".join(expired) + loss, is_partial=bool(left))

    def _check_not_cut(self, attempt: "Attempt", metadata: SourceMetadata, topic: Topic) -> None:
        """Refuse records that have taken the offsets of planned ones."""
        planned = {str(partition): metadata["partitions"][str(partition)] for partition in _ranges(metadata)}
        shorter: dict[str, str | PartitionUnavailable | None] = {}
        for partition, end in topic.offsets("latest").items():
            if (last := planned.get(str(partition))) and not (isinstance(end, int) and end >= last["end"]):
                shorter[str(partition)] = f"it ends at offset {end}" if isinstance(end, int) else end
        for name, cut in (shorter or losses(topic, planned)).items():
            if isinstance(cut, PartitionUnavailable):
                raise cut
            if cut is not None:
                raise SourceChanged(
                    f"Partition {name} of topic {topic.name}: this batch was planned up to offset {planned[name]['end']}, "
                    f"and its brokers have lost records before that since: {cut}. Copy what each partition has from the "
                    "batch's first offsets on into a new topic, let producers go on there, and declare it here, with "
                    f"generation={self._source.generation + 1}; raise the pipeline's version, and give this batch up: "
                    f"{skip_command(attempt.pipeline, attempt.txid)}"
                )

    def _expired(self, message: str, *, is_partial: bool = False) -> TidegateError:
        """Return the error for expired records; it is retryable only if an attempt may leave them out."""
        if self._source.when_expired == "continue":
            return SourceUnavailable(f"{message} The next attempt goes without them.")
        attempt = self._attempt
        skip = skip_command(attempt.pipeline, attempt.txid) if attempt else skip_command()
        all_of_it = ", with what can still be read," if is_partial else ""
        advice = f"Give the batch up{all_of_it} by: {skip}"
        if self._source.kind == "opaque":
            advice += '; or declare when_expired="continue", and all but what has expired is read.'
        return RangeExpired(f"{message} {advice}")

    def _options(self, topic: str, ranges: dict[int, tuple[int, int]]) -> dict[str, str]:
        """Return the options of Spark's Kafka source, without secrets."""
        starts, ends = ({str(p): bounds[side] for p, bounds in ranges.items()} for side in (0, 1))
        return {
            "assign": json.dumps({topic: list(ranges)}),
            "startingOffsets": json.dumps({topic: starts}),
            "endingOffsets": json.dumps({topic: ends}),
            "failOnDataLoss": "true",
            "includeHeaders": str(self._source.headers).lower(),
            "maxRecordsPerPartition": str(RECORDS_PER_TASK),
            "kafkaConsumer.pollTimeoutMs": str(POLL_MILLISECONDS),
            "kafka.default.api.timeout.ms": str(API_MILLISECONDS),
            "kafka.request.timeout.ms": str(API_MILLISECONDS),
            **{f"kafka.{name}": value for name, value in self._log_in().items()},
            "kafka.isolation.level": "read_committed",
        }

    def _log_in(self) -> dict[str, str]:
        """Return the Java client's configuration; references to the properties file replace secrets."""
        properties = kafka_java_client(self._settings)
        file = self._settings.kafka_properties_file
        secret = {name: value for name, value in properties.items() if SECRET.search(name)}
        if not secret or file is None:
            return properties
        configured = kafka_client(self._settings)
        if any(character in configured.get(name, "") for name in configured if SECRET.search(name) for character in '\\"'):
            raise SettingsInvalid(f'{file}: Spark cannot read a password with \\ or " in it. Choose another.')
        if "sasl.jaas.config" in secret and "sasl.jaas.config" not in configured:
            module = secret.pop("sasl.jaas.config").split()[0]
            user, password = (_reference_to(file, name) for name in ("sasl.username", "sasl.password"))
            properties["sasl.jaas.config"] = f'{module} required username="{user}" password="{password}";'
        properties |= {name: _reference_to(file, name) for name in secret}
        providers = ",".join(filter(None, ["file", properties.get("config.providers")]))
        return {**properties, "config.providers": providers, "config.providers.file.class": FILE_PROVIDER}


def _ranges(metadata: SourceMetadata) -> dict[int, tuple[int, int]]:
    """Return start and end for each partition with a range that is not empty."""
    if "topic_id" not in metadata:
        raise SourceChanged(OF_ANOTHER_SOURCE)
    slices: dict[str, Any] = metadata["partitions"]
    return {
        int(name): (s["start"], s["end"])
        for name, s in sorted(slices.items(), key=lambda item: int(item[0]))
        if s["start"] < s["end"]
    }


def _reference_to(file: Any, name: str) -> str:
    """Return what Java's Kafka client replaces by a property in the file."""
    return f"${{file:{file}:{name}}}"
