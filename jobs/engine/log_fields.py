"""Fields of log lines: which pipeline, txid and attempt a line is about.

Airflow writes them into each line of a task's log, and `tidegate run --log-json` into its lines.
"""

from contextlib import AbstractContextManager

from structlog.contextvars import bound_contextvars


def about(pipeline: str, txid: int | None = None, attempt: int | None = None) -> AbstractContextManager[None]:
    """Give the log lines of a block these fields; those of an outer block are put back at its end."""
    fields = {"pipeline": pipeline, "txid": txid, "attempt": attempt}
    return bound_contextvars(**{name: value for name, value in fields.items() if value is not None})
