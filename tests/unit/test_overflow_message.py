"""The message of an overflow."""

import pytest

from tidegate.jobs.spark.spark_errors import first_line

OVERFLOW = (
    "[ARITHMETIC_OVERFLOW] long overflow. Use 'try_add' to tolerate overflow and return NULL instead. "
    'If necessary set "spark.sql.ansi.enabled" to "false" to bypass this error. SQLSTATE: 22003\n== SQL =='
)
OUT_OF_RANGE = (
    "[NUMERIC_VALUE_OUT_OF_RANGE.WITH_SUGGESTION] 1000 cannot be represented as Decimal(3, 0). "
    'If necessary set "spark.sql.ansi.enabled" to "false" to bypass this error, and return NULL instead. SQLSTATE: 22003'
)


@pytest.mark.parametrize("text", [OVERFLOW, OUT_OF_RANGE])
def test_an_overflow_message_does_not_advise_to_lose_values(text: str) -> None:
    """The setting is Tidegate's own; the rest of the message stays."""
    found = first_line(ValueError(text))
    assert "ansi" not in found
    assert found.startswith(text[:30])
    assert found.endswith("SQLSTATE: 22003")
