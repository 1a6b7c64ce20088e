"""Errors of ours that Spark's tasks and expressions raise: Spark passes on only text, with class and message after MARK.

Such a text may also quote values of records. MARK is drawn by each driver, and its tasks carry the mark, so that no record can
contain it.
"""

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tidegate.state_store.base import errors
from tidegate.state_store.base.errors import TidegateError

if TYPE_CHECKING:
    from pyspark.sql import Column

MARK = f"TIDEGATE_ERROR_{secrets.token_hex(8)}"
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@contextmanager
def reporting(mark: str) -> Iterator[None]:
    """Raise a task's errors of ours so that `reported_in` finds them in Spark's error; `mark` is the driver's MARK."""
    try:
        yield
    except TidegateError as error:
        # Braces in a text are no placeholders.
        report = {"error": type(error).__name__, "message": "{text}", "text": str(error)}
        raise ValueError(f"{mark} {json.dumps(report)}") from error


def refusal(kind: type[TidegateError], message: str, **values: "Column") -> "Column":
    """Return an expression that fails its query with an error of ours.

    `message` is a template of `str.format`; its placeholders are the values, as text. NULL is the empty text.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415 - declaring a pipeline must not load pyspark

    texts = {"error": F.lit(kind.__name__), "message": F.lit(message)} | values
    report = F.struct(*(F.coalesce(text.cast("string"), F.lit("")).alias(name) for name, text in texts.items()))
    return F.raise_error(F.concat(F.lit(f"{MARK} "), F.to_json(report)))


def reported_in(error: Exception) -> TidegateError | None:
    """Return the error that a task or an expression has reported in the text of Spark's error; None if there is none."""
    text = str(error)
    start = text.find(f"{MARK} {{")  # the mark alone stands in the plan of any other error
    if start < 0:
        return None
    report: dict[str, Any] = json.JSONDecoder().raw_decode(text, start + len(MARK) + 1)[0]
    values = {name: CONTROL.sub(lambda found: repr(found[0])[1:-1], str(value)) for name, value in report.items()}  # one line
    return getattr(errors, report["error"])(report["message"].format(**values))  # type: ignore[no-any-return]
