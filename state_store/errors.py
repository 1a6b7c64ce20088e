"""What can go wrong, cut by what the reader can do about it.

    TidegateError                 carries pipeline, txid and attempt as attributes
      RetryableError              trying again is right; at worst the retry finds the work already done
        CommitOutOfOrder          an earlier txid has not committed yet
        AttemptNotSealed          the newest attempt is still processing, somewhere else
        StagingLost               the sealed rows are gone or damaged: process the batch again
        StoreUnavailable          no connection, a lock or statement timeout, a deadlock
        SparkUnavailable          the Spark server is away
        SparkFailed               Spark gave up on the batch, for a reason that may pass
        SourceUnavailable         the source does not answer
          PartitionUnavailable    one of its partitions has vanished or cannot be reached
        AttemptTimedOut           the attempt exceeded the pipeline's message timeout
        RowsLost                  the acker's sums do not meet: not every row was fully processed
        BatchRetried              a try at a batch has failed; the pipeline's policy wants another
        PipelinePaused            somebody has paused the pipeline
      AttemptFenced               a newer attempt owns the batch; this one stops and its work never counts
      PermanentError              a person has to look; trying again cannot help
        UsageError                the request itself is wrong (exit code 2)
          UnknownPipeline
          UnknownBatch
          RangeRefused            a txid range that is upside down or would leave a gap
        SettingsInvalid           a setting cannot be used
        AccessRefused             Postgres refuses the user, the password or the database
        SchemaOutOfDate           the database is not at the revision this code was written for
        DeclarationInvalid        what the transform returns does not fit the declared states
        DeclarationChanged        the pipeline's declaration no longer matches what was registered
        SourceUnreadable          a file or folder is missing, not readable, or not what it claims to be
        SourceChanged             a transactional source would replay other rows than it planned
        RangeExpired              the source no longer has the rows that the batch would read
        MalformedRecord           a record that cannot be read as declared
        BadKey                    a key that cannot be stored: NULL, NUL character, too long
        Overflow                  a value outside its column's range
        MetadataCorrupt           the saved source metadata does not match its digest
        GuardMismatch             a state row is ahead of the ledger: somebody else wrote the table
        HoleDetected              the cursor is behind what the ledger already committed, or in a restored database

A class exists where somebody catches it or an operator acts differently on it. ``AttemptFenced`` is neither retryable nor
permanent: the work goes on, elsewhere.
"""

from typing import Any


class TidegateError(Exception):
    """The root of all errors that Tidegate raises on purpose."""

    # Whether it lies in the batch itself: only such failures count as tries when a pipeline gives up on a batch.
    is_poison = False

    def __init__(
        self, message: str, *, pipeline: str | None = None, txid: int | None = None, attempt: int | None = None
    ) -> None:
        super().__init__(message)
        self.pipeline = pipeline
        self.txid = txid
        self.attempt = attempt

    @property
    def code(self) -> str:
        """The error's name as programs see it: ``SourceChanged`` is ``SOURCE_CHANGED``."""
        name = type(self).__name__
        return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()

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


class AttemptNotSealed(RetryableError):
    """The newest attempt has not sealed its staging."""


class StagingLost(RetryableError):
    """Sealed rows are gone or damaged; the batch has to be processed again."""


class StoreUnavailable(RetryableError):
    """Postgres did not answer, or gave up on a lock or a statement."""


class SparkUnavailable(RetryableError):
    """The Spark server did not answer, or lost the work."""


class SparkFailed(RetryableError):
    """Spark gave up on the batch, for a reason that may pass."""

    is_poison = True


class SourceUnavailable(RetryableError):
    """The source does not answer."""


class PartitionUnavailable(SourceUnavailable):
    """A partition of the source has vanished or cannot be reached."""


class AttemptTimedOut(RetryableError):
    """The attempt exceeded the pipeline's message timeout."""

    is_poison = True


class RowsLost(RetryableError):
    """The acker's sums do not meet: not every row of the batch was fully processed."""

    is_poison = True


class BatchRetried(RetryableError):
    """A try at a batch has failed; the pipeline's policy wants another."""


class PipelinePaused(RetryableError):
    """Somebody has paused the pipeline."""


class AttemptFenced(TidegateError):
    """A newer attempt owns the batch; this one stops and its work never counts (CONTRACT I4, I5)."""


class PermanentError(TidegateError):
    """A person has to look; trying again cannot help."""


class UsageError(PermanentError):
    """The request itself is wrong."""


class UnknownPipeline(UsageError):
    """No pipeline has this name."""


class UnknownBatch(UsageError):
    """The pipeline has no batch with this txid."""


class RangeRefused(UsageError):
    """A txid range that is upside down or would leave a gap."""


class SettingsInvalid(PermanentError):
    """A setting cannot be used."""


class AccessRefused(PermanentError):
    """Postgres refuses the user, the password or the database."""


class SchemaOutOfDate(PermanentError):
    """The database is not at the revision this code was written for."""


class DeclarationInvalid(PermanentError):
    """What the transform returns does not fit the declared states."""

    is_poison = True


class DeclarationChanged(PermanentError):
    """The pipeline's declaration no longer matches what was registered (CONTRACT I16)."""


class SourceUnreadable(PermanentError):
    """A file or folder is missing, not readable, or not what it claims to be."""

    is_poison = True


class SourceChanged(PermanentError):
    """A transactional source would replay other rows than it planned (CONTRACT I11)."""

    is_poison = True


class RangeExpired(PermanentError):
    """The source no longer has the rows that the batch would read."""

    is_poison = True


class MalformedRecord(PermanentError):
    """A record that cannot be read as declared."""

    is_poison = True


class BadKey(PermanentError):
    """A key that cannot be stored."""

    is_poison = True


class Overflow(PermanentError):
    """A value outside its column's range."""

    is_poison = True


class MetadataCorrupt(PermanentError):
    """The saved source metadata does not match its digest (CONTRACT I6, I19)."""


class GuardMismatch(PermanentError):
    """A state row is ahead of the ledger (CONTRACT I14)."""


class HoleDetected(PermanentError):
    """The cursor is behind what the ledger already committed (CONTRACT I9)."""
