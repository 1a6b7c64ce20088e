"""The errors, grouped by what the reader can do about them.

    TidegateError                 has pipeline, txid and attempt as attributes; its class says where the fault lies
      RetryableError              trying again is right; at worst the retry finds the work already done
        CommitOutOfOrder          an earlier txid has not committed yet
        AttemptNotSealed          the newest attempt at the batch is still processing, somewhere else
        StagingLost               no staging that may be committed: process the batch again
        StoreUnavailable          no connection, a lock or statement timeout, a deadlock
        SparkUnavailable          the Spark server is away
        SparkFailed               Spark gave up on the batch, for a reason that may pass
        SourceUnavailable         the source does not answer
          PartitionUnavailable    one of its partitions has vanished or cannot be reached
        AttemptTimedOut           the attempt exceeded the pipeline's message timeout
        RowsLost                  counts or hash sums of rows disagree: not every row was fully processed, exactly once
        BatchRetried              an attempt has failed; the pipeline's policy for bad content wants another
        PipelinePaused            an operator has paused the pipeline
      AttemptFenced               a newer attempt owns the batch; this one stops, and its work is never committed
      PermanentError              a person has to look; trying again cannot help
        UsageError                the request itself is wrong (exit code 2)
          UnknownPipeline
          UnknownBatch
          RangeRefused            txids (batches' numbers) that are upside down, would leave a gap, or cannot be changed
        SettingsInvalid           a setting cannot be used
        AccessRefused             Postgres refuses the user, the password or the database
        ListenerNotTrusted        another account of this machine has the port to which a token or password would be sent
        ExecutorsUnprepared       Spark's executors, on other machines, lack a Python package or the right Python
        SchemaOutOfDate           the database is not at the revision that this code needs, or lacks a pipeline or a table
        DeclarationInvalid        what the transform returns does not fit the declared states, or Spark refuses its code
        DeclarationChanged        the pipeline's declaration no longer matches what was registered
        SourceUnreadable          the source is not as declared, or may not be read: a folder, a topic, a table
        SourceChanged             a transactional source would replay other rows than it planned
        RangeExpired              the source no longer has the rows that the batch would read
        MalformedRecord           a record, or a whole file, that cannot be read as declared
        TransformFailed           a record that the transform cannot compute
        BadKey                    a key that cannot be stored: NULL, NUL character, too long
        Overflow                  a value outside its column's range
        CheckFailed               a check of the pipeline finds something in the batch, or in what it makes of the states
        MetadataCorrupt           the saved source metadata is damaged, or continues another batch than the last committed
        GuardMismatch             state rows are ahead of the ledger, or were not written: another writer changed the table
        HoleDetected              the database is older than it was, is another copy, or contradicts itself

A class exists where code catches it or an operator acts differently on it. ``AttemptFenced`` is neither retryable nor
permanent: the work goes on elsewhere.
"""

from enum import Enum
from functools import cache
from typing import Any

OTHER = "OTHER"


class Fault(Enum):
    """Where the cause of a failure lies. The pipeline's policy for bad content decides what follows."""

    CONTENT = "the content of the batch"
    PIPELINE = "the pipeline's code or declaration, the settings, or the request"
    SOURCE = "the source is not what was planned or declared"
    LEDGER = "the ledger or a state table was changed from outside, lost or restored"
    SERVER = "a server, a mount or a network is away"
    COMPUTATION = "the computation failed, by Spark, a worker process or a time limit"
    ORDER = "no failure: the work goes on later, or elsewhere"
    UNKNOWN = "unknown"


@cache
def _faults() -> dict[str, Fault]:
    """Return the fault of each code."""
    classes = [TidegateError]
    for each in classes:
        classes += each.__subclasses__()
    return {each("").code: each.fault for each in classes}


def code_and_fault(error: str) -> tuple[str, Fault]:
    """Return the code at the beginning of an error in the ledger, and its fault; OTHER for any other exception."""
    code = error.partition(":")[0]
    fault = _faults().get(code)
    return (OTHER, Fault.UNKNOWN) if fault is None else (code, fault)


def storable(text: str) -> str:
    """Return a message that Postgres can store: it may quote a record's NUL, or a name that is not UTF-8."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")


class TidegateError(Exception):
    """The root of all errors that Tidegate raises on purpose."""

    fault = Fault.UNKNOWN

    def __init__(
        self, message: str, *, pipeline: str | None = None, txid: int | None = None, attempt: int | None = None
    ) -> None:
        super().__init__(message)
        self.pipeline = pipeline
        self.txid = txid
        self.attempt = attempt

    @property
    def is_poison(self) -> bool:
        """Return whether the batch's content is at fault: only such failures lead to giving it up."""
        return self.fault is Fault.CONTENT

    @property
    def code(self) -> str:
        """The error's name as programs see it: ``SourceChanged`` is ``SOURCE_CHANGED``."""
        name = type(self).__name__
        return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()

    @property
    def more(self) -> str:
        """The line that leads from the message to the error's page in docs/errors."""
        return f"More: tidegate error {self.code}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Survive pickling, because errors cross process borders (Airflow, Spark)."""
        identity = {"pipeline": self.pipeline, "txid": self.txid, "attempt": self.attempt}
        return _rebuild, (type(self), str(self), identity)


def _rebuild(cls: type[TidegateError], message: str, identity: dict[str, Any]) -> TidegateError:
    return cls(message, **identity)


class RetryableError(TidegateError):
    """Trying again is right; at worst the retry finds the work already done."""


class CommitOutOfOrder(RetryableError):
    """An earlier txid has not committed yet."""

    fault = Fault.ORDER


class AttemptNotSealed(RetryableError):
    """The newest attempt has not sealed its staging."""

    fault = Fault.ORDER


class StagingLost(RetryableError):
    """The batch has no staging that may be committed, so it has to be processed again.

    Its newest attempt is missing, failed, silent or too old, or was computed by another declaration; its staging is gone or
    damaged; it continues another batch than the last committed, or reads a committed file; a redo has no newer attempt.
    """

    fault = Fault.ORDER


class StoreUnavailable(RetryableError):
    """Postgres did not answer, or gave up on a lock or a statement."""

    fault = Fault.SERVER


class SparkUnavailable(RetryableError):
    """The Spark server did not answer, or lost the work."""

    fault = Fault.SERVER


class SparkFailed(RetryableError):
    """Spark gave up on the batch, for a reason that may pass or is unknown."""

    fault = Fault.COMPUTATION


class SourceUnavailable(RetryableError):
    """The source does not answer: its server, its mount, its disk."""

    fault = Fault.SERVER


class PartitionUnavailable(SourceUnavailable):
    """A partition of the source has vanished or cannot be reached."""


class AttemptTimedOut(RetryableError):
    """The attempt exceeded the pipeline's message timeout."""

    fault = Fault.COMPUTATION


class RowsLost(RetryableError):
    """The counts or hash sums of a batch's rows disagree: not every row was fully processed, exactly once."""

    fault = Fault.COMPUTATION


class BatchRetried(RetryableError):
    """An attempt has failed; the pipeline's policy for bad content wants another."""

    fault = Fault.ORDER


class PipelinePaused(RetryableError):
    """An operator has paused the pipeline."""

    fault = Fault.ORDER


class AttemptFenced(TidegateError):
    """A newer attempt owns the batch; this one stops, and its work is never committed (I4 in docs/protocol.md)."""

    fault = Fault.ORDER


class PermanentError(TidegateError):
    """A person has to look; trying again cannot help."""


class UsageError(PermanentError):
    """The request itself is wrong."""

    fault = Fault.PIPELINE


class UnknownPipeline(UsageError):
    """No pipeline has this name."""


class UnknownBatch(UsageError):
    """The pipeline has no batch with this txid."""


class RangeRefused(UsageError):
    """The requested txids are upside down, would leave a gap, or cannot be changed."""


class SettingsInvalid(PermanentError):
    """A setting cannot be used."""

    fault = Fault.PIPELINE


class AccessRefused(PermanentError):
    """Postgres refuses the user, the password or the database."""

    fault = Fault.PIPELINE


class ListenerNotTrusted(PermanentError):
    """Another account of this machine has the port to which a token or a password would be sent."""

    fault = Fault.PIPELINE


class ExecutorsUnprepared(PermanentError):
    """Spark's executors, on other machines, lack a package that does not travel, or the right Python."""

    fault = Fault.PIPELINE


class SchemaOutOfDate(PermanentError):
    """The database is not at the revision that this code needs, or lacks a pipeline or a table."""

    fault = Fault.PIPELINE


class DeclarationInvalid(PermanentError):
    """The transform's result does not fit the declared states, or Spark refuses its code for any data."""

    fault = Fault.PIPELINE


class DeclarationChanged(PermanentError):
    """The pipeline's declaration no longer matches what was registered (I16)."""

    fault = Fault.PIPELINE


class SourceUnreadable(PermanentError):
    """The source is not as declared, or may not be read. A damaged file is a `MalformedRecord`."""

    fault = Fault.SOURCE


class SourceChanged(PermanentError):
    """A transactional source would replay other rows than it planned (I11)."""

    fault = Fault.SOURCE


class RangeExpired(PermanentError):
    """The source no longer has the rows that the batch would read."""

    fault = Fault.SOURCE


class MalformedRecord(PermanentError):
    """A record, or a whole file, that cannot be read as declared."""

    fault = Fault.CONTENT


class TransformFailed(PermanentError):
    """A record that the transform cannot compute: Spark blames the data, or the author's code raised on it."""

    fault = Fault.CONTENT


class BadKey(PermanentError):
    """A key that cannot be stored."""

    fault = Fault.CONTENT


class Overflow(PermanentError):
    """A value outside its column's range."""

    fault = Fault.CONTENT


class CheckFailed(PermanentError):
    """A check finds something wrong with a batch, or with what it would make of the states."""

    fault = Fault.CONTENT


class MetadataCorrupt(PermanentError):
    """The saved source metadata is damaged, of an unknown version, or continues another batch than the last committed."""

    fault = Fault.LEDGER


class GuardMismatch(PermanentError):
    """Rows of a state are ahead of the ledger, or were not written: another writer changed the table (I14)."""

    fault = Fault.LEDGER


class HoleDetected(PermanentError):
    """The database is older than it was, is another copy, or contradicts itself: commits may be missing (I9)."""

    fault = Fault.LEDGER
