"""Fields of log lines: which pipeline, txid and attempt a line is about.

Airflow writes these fields into each line of a task's log; `tidegate run --log-json` writes them into its own lines.
"""

from contextlib import AbstractContextManager

from structlog.contextvars import bound_contextvars


def about(pipeline: str, txid: int | None = None, attempt: int | None = None) -> AbstractContextManager[None]:
    """Give the log lines of a block these fields; at its end, the fields of an outer block apply again."""
    fields = {"pipeline": pipeline, "txid": txid, "attempt": attempt}
    return bound_contextvars(**{name: value for name, value in fields.items() if value is not None})
