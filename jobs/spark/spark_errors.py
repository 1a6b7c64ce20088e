"""The meaning of Spark's errors: where the fault lies, decided by condition and SQLSTATE.

Only an error that Spark itself attributes to a value or to the code blames data or code. A worker that crashed, a file that
could not be read, a session that is gone, an exception whose name says nothing about data: none of these does.
"""

import re
from collections.abc import Iterable, Iterator

import grpc
from pyspark.errors import AnalysisException, PySparkAssertionError, PySparkException, PythonException

from tidegate.state_store.base.errors import (
    DeclarationInvalid,
    MalformedRecord,
    Overflow,
    PermanentError,
    SettingsInvalid,
    SourceUnavailable,
    SparkFailed,
    SparkUnavailable,
    TidegateError,
    TransformFailed,
)

# Conditions of a server that was restarted, forgot the session, or does not answer; PySpark raises some without a gRPC status.
_SERVER_GONE = ("INVALID_HANDLE", "NO_ACTIVE_SESSION", "RESPONSE_ALREADY_RECEIVED", "SESSION_CLOSED", "SESSION_NOT_SAME")
_OTHER_SERVER = "server side session identifier"
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_OVERFLOWS = ("ARITHMETIC_OVERFLOW", "NUMERIC_VALUE_OUT_OF_RANGE", "CAST_OVERFLOW")
# Classes of SQLSTATE about values: too many rows where one is due, data exceptions, duplicate keys, raise_error().
_DATA_CLASSES = ("21", "22", "23", "P0")
# States of these classes that blame no data: three about configuration (Kryo, settings, options), those with a K about tables.
_NOT_DATA = re.compile(r"22002|22022|22024|...?K")
_CODE_CLASSES = ("42", "0A")
_MISSING_PATHS = ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA")
# Python's exceptions for a bad value. An OSError, a MemoryError, an ImportError, or a class of a library is not one of them:
# the next attempt may find the server, the memory or the package there.
_ABOUT_VALUES = frozenset(
    {
        *("ValueError", "TypeError", "AttributeError", "AssertionError", "LookupError", "KeyError", "IndexError"),
        *("ArithmeticError", "ZeroDivisionError", "OverflowError", "FloatingPointError"),
        *("UnicodeError", "UnicodeDecodeError", "UnicodeEncodeError", "UnicodeTranslateError"),
        *("decimal.InvalidOperation", "decimal.DivisionByZero", "decimal.Overflow", "json.decoder.JSONDecodeError"),
        *(f"tidegate.state_store.base.errors.{error.__name__}" for error in (MalformedRecord, TransformFailed)),
    }
)
# The second is what Spark's reader of Parquet files says; the others are its own words, also for the driver's broadcasts.
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError(: [^\n;]+)?|Cannot reserve additional contiguous bytes|[Nn]ot? enough memory (to|for) [a-z ]+"
    r"|(Unable to acquire|Could not allocate) [^\n;.]*memory"
)
_TRACEBACK = "Traceback (most recent call last):"
_OF_GROUP = re.compile(r"^ *\| ?")  # begins the lines of an ExceptionGroup
_RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)")
_SHOWN_CHARACTERS = 300
_DETAILS = re.compile(r'^<\w*RpcError.*?\n\s*details = "(.+?)"\n', re.DOTALL)  # of an error of gRPC
# Tidegate always sets this option: without it an overflow wraps around, or becomes NULL.
_NO_ADVICE = re.compile(r"\s*If necessary,? set [^.]*spark\.sql\.ansi\.enabled\W+to \W*false\W.*?bypass this error[^.]*\.")


def meaning_of(error: PySparkException | grpc.RpcError, attempt: int = 1) -> TidegateError:
    """Return our error for one of Spark's; SparkFailed, which is retried, unless data or code is known to be at fault.

    TransformFailed and Overflow blame the content; DeclarationInvalid blames code that Spark refuses whatever the data.
    """
    message = first_line(error)
    if is_away(error):
        return SparkUnavailable(f"Spark's server is away, or lost the work: {message}")
    assert isinstance(error, PySparkException)
    if _status_of(error) in _REFUSED:
        return SettingsInvalid(f"Spark refuses the token: {message}. See: tidegate settings")
    condition, state = error.getCondition() or "", error.getSqlState() or ""
    if condition.startswith(_MISSING_PATHS):
        return SourceUnavailable(f"Spark does not find its input: {message}")
    if isinstance(error, AnalysisException) or state.startswith(_CODE_CLASSES):
        return DeclarationInvalid(f"Spark refused the batch: {message}")
    if condition.startswith(_OVERFLOWS):
        return Overflow(f"A value is out of range: {message}")
    if state.startswith(_DATA_CLASSES) and not _NOT_DATA.match(state):
        return TransformFailed(f"The transform failed at a value: {message}")
    if out_of_memory := _OUT_OF_MEMORY.search(str(error)):
        return _meaning_of_memory(out_of_memory[0], attempt)
    if isinstance(error, PythonException):
        return _meaning_in_python(error)
    return SparkFailed(f"Spark failed: {message}")


def _meaning_of_memory(cause: str, attempt: int) -> TidegateError:
    """Return the error for a batch that needs more memory than Spark has: one more try, as others may have had it meanwhile."""
    kind = SparkFailed if attempt == 1 else PermanentError
    return kind(
        f"Spark ran out of memory over this batch ({cause}). It needs shorter rows, smaller batches, a transform that "
        "holds less at once, or more memory for Spark."
    )


def _meaning_in_python(error: PythonException) -> TidegateError:
    raised = raised_in_python(str(error))
    message = raised[-1][1] if raised else first_line(error)
    if raised and all(name in _ABOUT_VALUES for name, _ in raised):
        return TransformFailed(f"The transform's Python code failed at a value: {message}")
    return SparkFailed(f"Python code failed in Spark: {message}")


def is_away(error: PySparkException | grpc.RpcError) -> bool:
    """Return whether the server does not answer, or is not the one that had the session."""
    if isinstance(error, grpc.RpcError):
        return True
    if _status_of(error) in _AWAY or (isinstance(error, PySparkAssertionError) and _OTHER_SERVER in str(error)):
        return True
    return (error.getCondition() or str(error).strip().removeprefix("[")).startswith(_SERVER_GONE)


def _status_of(error: PySparkException | grpc.RpcError) -> grpc.StatusCode | None:
    """Return the gRPC status of a call that failed; None if Spark's client has found the error itself."""
    status: grpc.StatusCode | None = getattr(error, "getGrpcStatusCode", lambda: None)()
    return status


def raised_in_python(text: str) -> list[tuple[str, str]]:
    """Return class and message of each exception in a Python worker's tracebacks, in order.

    An exception may have been raised while another one was handled, and may quote a traceback in its own message: all count.
    """
    raised = []
    for block in text.split(_TRACEBACK)[1:]:
        if exception := next(_raised(block.splitlines()[1:]), None):
            raised.append(exception)
    return raised


def _raised(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in (_OF_GROUP.sub("", line) for line in lines):
        if line and not line.startswith(" ") and (match := _RAISED.match(line)):
            yield match[1], line[:_SHOWN_CHARACTERS]


def first_line(error: Exception) -> str:
    """Return an error's first line, without plans and traces, and without Spark's advice to turn its ANSI mode off."""
    text = str(error).strip()
    details = _DETAILS.search(text)
    return _NO_ADVICE.sub("", details[1] if details else " ".join(text.splitlines()[:1]))
