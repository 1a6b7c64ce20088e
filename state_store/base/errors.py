"""The errors, grouped by what the reader can do about them: try again, look, or correct the request.

A class exists where code catches it or an operator acts differently on it. ``AttemptFenced`` is neither retryable nor
permanent: the work goes on elsewhere.
"""

from enum import Enum
from functools import cache

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
def _classes() -> "dict[str, type[TidegateError]]":
    classes = [TidegateError]
    for each in classes:
        classes += each.__subclasses__()
    return {each("").code: each for each in classes}


def class_of(code: str | None) -> "type[TidegateError]":
    """Return the class of a code; that of any error that a person has to look at, if it is none of ours."""
    return _classes().get(code or "", PermanentError)


def code_and_fault(error: str) -> tuple[str, Fault]:
    """Return the code at the beginning of an error in the ledger, and its fault; OTHER for any other exception."""
    code = error.partition(":")[0]
    known = _classes().get(code)
    return (OTHER, Fault.UNKNOWN) if known is None else (code, known.fault)


def skip_command(pipeline: str = "PIPELINE", txid: int | str = "TXID") -> str:
    """Return the command that gives a batch up, to copy; the reader fills in the reason."""
    return f'tidegate skip {pipeline} {txid} --reason "..." --yes'


def describe(error: BaseException) -> str:
    """Return an error as the ledger keeps it: its code, or its class, and its message."""
    return f"{error.code}: {error}" if isinstance(error, TidegateError) else class_and_text(error)


def class_and_text(error: BaseException) -> str:
    """Return an error's class and text; an author's class may fail to make one."""
    try:
        return f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        raise
    except BaseException as failed:  # noqa: BLE001 - whatever that code raises
        return f"{type(error).__name__} (its text cannot be made: {type(failed).__name__})"


def storable(text: str) -> str:
    """Return a message that Postgres can store: it may quote a record's NUL, or a name that is not UTF-8."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")


def one_line(text: str) -> str:
    """Return a message in one line: a name that it quotes, such as a file's, may have line ends."""
    return text.replace("\n", "\\n")


class TidegateError(Exception):
    """The root of all errors that Tidegate raises on purpose."""

    fault = Fault.UNKNOWN

    def __str__(self) -> str:
        """Return the message."""
        return one_line(super().__str__())

    def __init_subclass__(cls, *, fault: Fault | None = None) -> None:
        """Set where the fault of this class lies, if it is not that of its parent."""
        cls.fault = fault or cls.fault

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


class RetryableError(TidegateError):
    """Trying again is right; at worst the retry finds the work already done."""


class CommitOutOfOrder(RetryableError, fault=Fault.ORDER):
    """An earlier txid has not committed yet."""


class AttemptNotSealed(RetryableError, fault=Fault.ORDER):
    """The newest attempt at the batch is still processing, somewhere else."""


class Unprocessed(RetryableError, fault=Fault.ORDER):
    """The batch has no result that may be committed, so it has to be processed, or processed again.

    Its newest attempt is missing, failed, silent or too old, or was computed by another declaration; its staging is gone or
    damaged; it continues another batch than the last committed, or reads a committed file; a redo has no newer attempt.
    """


class StoreUnavailable(RetryableError, fault=Fault.SERVER):
    """Postgres did not answer, or gave up on a statement."""


class LockHeld(StoreUnavailable):
    """Another session of Postgres, the ledger's or a source's, keeps a lock that the step needs."""


class SparkUnavailable(RetryableError, fault=Fault.SERVER):
    """The Spark server did not answer, or lost the work."""


class SparkFailed(RetryableError, fault=Fault.COMPUTATION):
    """Spark gave up on the batch, for a reason that may pass or is unknown."""


class SourceUnavailable(RetryableError, fault=Fault.SERVER):
    """The source does not answer: its server, its mount, its disk."""


class PartitionUnavailable(SourceUnavailable):
    """A partition of the source has vanished or cannot be reached."""


class AttemptTimedOut(RetryableError, fault=Fault.COMPUTATION):
    """The attempt exceeded the pipeline's message timeout."""


class RowsLost(RetryableError, fault=Fault.COMPUTATION):
    """The counts or hash sums of a batch's rows disagree: not every row was fully processed, exactly once."""


class BatchRetried(RetryableError, fault=Fault.ORDER):
    """An attempt has failed; the pipeline's policy for bad content wants another."""


class PipelinePaused(RetryableError, fault=Fault.ORDER):
    """An operator has paused the pipeline."""


class AttemptFenced(TidegateError, fault=Fault.ORDER):
    """A newer attempt owns the batch; this one stops, and its work is never committed (I4 in docs/protocol.md)."""


class PermanentError(TidegateError):
    """A person has to look; trying again cannot help."""


class UsageError(PermanentError, fault=Fault.PIPELINE):
    """The request itself is wrong (exit code 2)."""


class UnknownPipeline(UsageError):
    """No pipeline has this name."""


class UnknownBatch(UsageError):
    """The pipeline has no batch with this txid."""


class PipelineRetired(UsageError):
    """An operator has retired the pipeline: no batch of it counts any more (I23)."""


class RangeRefused(UsageError):
    """Txids (batches' numbers) that are upside down, would leave a gap, or cannot be changed."""


class SettingsInvalid(PermanentError, fault=Fault.PIPELINE):
    """A setting cannot be used."""


class AccessRefused(PermanentError, fault=Fault.PIPELINE):
    """Postgres refuses the user, the password or the database."""


class ListenerNotTrusted(PermanentError, fault=Fault.PIPELINE):
    """Another account of this machine has the port to which a token or a password would be sent."""


class ExecutorsUnprepared(PermanentError, fault=Fault.PIPELINE):
    """Spark's executors, on other machines, lack a package that does not travel, or the right Python."""


class SchemaOutOfDate(PermanentError, fault=Fault.PIPELINE):
    """The database is not at the revision that this code needs, or lacks a pipeline or a table."""


class DeclarationInvalid(PermanentError, fault=Fault.PIPELINE):
    """The transform's result does not fit the declared states, or Spark refuses its code for any data."""


class DeclarationChanged(PermanentError, fault=Fault.PIPELINE):
    """The pipeline's declaration no longer matches what was registered (I16)."""


class SourceUnreadable(PermanentError, fault=Fault.SOURCE):
    """The source is not as declared, or may not be read. A damaged file is a `MalformedRecord`."""


class SourceChanged(PermanentError, fault=Fault.SOURCE):
    """A transactional source would replay other rows than it planned (I11)."""


class RangeExpired(PermanentError, fault=Fault.SOURCE):
    """The source no longer has the rows that the batch would read."""


class MalformedRecord(PermanentError, fault=Fault.CONTENT):
    """A record, or a whole file, that cannot be read as declared."""


class TransformFailed(PermanentError, fault=Fault.CONTENT):
    """A record that the transform cannot compute: Spark blames the data, or the author's code raised on it."""


class BadKey(PermanentError, fault=Fault.CONTENT):
    """A key that cannot be stored."""


class Overflow(PermanentError, fault=Fault.CONTENT):
    """A value outside its column's range."""


class CheckFailed(PermanentError, fault=Fault.CONTENT):
    """A check finds something wrong with a batch, or with what it would make of the states."""


class MetadataCorrupt(PermanentError, fault=Fault.LEDGER):
    """The saved source metadata is damaged, of an unknown version, or continues another batch than the last committed."""


class GuardMismatch(PermanentError, fault=Fault.LEDGER):
    """Rows of a state are ahead of the ledger, or were not written: another writer changed the table (I14)."""


class HoleDetected(PermanentError, fault=Fault.LEDGER):
    """The database is older than it was, is another copy, or contradicts itself: commits may be missing (I9)."""
