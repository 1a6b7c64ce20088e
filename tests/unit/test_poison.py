"""The table of outcomes is complete, agrees with the classes of errors, and is the documented one."""

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

from tests.store import errors
from tidegate.jobs.engine.poison import OUTCOMES, Outcome, fault_of
from tidegate.jobs.pipeline import PoisonPolicy
from tidegate.jobs.spark.spark_errors import raised_in_python
from tidegate.state_store.base.errors import Fault, PermanentError, TidegateError

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "poison.md"
ERRORS = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, TidegateError)]
FAMILIES = [TidegateError, errors.RetryableError, PermanentError]
CONCRETE = [cls for cls in ERRORS if cls not in FAMILIES]
POLICIES = get_args(PoisonPolicy)


def test_the_table_has_a_cell_for_each_fault_and_policy() -> None:
    """No failure is without an outcome."""
    assert set(OUTCOMES) == set(Fault)
    assert all(tuple(sorted(outcomes)) == tuple(sorted(POLICIES)) for outcomes in OUTCOMES.values())


@pytest.mark.promise("decision:0024")
def test_nothing_but_content_ever_leaves_rows_out() -> None:
    """One cell of the table skips."""
    skipping = [(fault, policy) for fault, row in OUTCOMES.items() for policy in row if row[policy] is Outcome.SKIP]

    assert skipping == [(Fault.CONTENT, "skip")]


@pytest.mark.parametrize("error", CONCRETE, ids=lambda cls: cls.__name__)
def test_every_error_has_a_fault(error: type[TidegateError]) -> None:
    """Every concrete class has one; only the families, which are not raised on purpose, leave it open."""
    assert error("x").fault is not Fault.UNKNOWN
    assert error("x").is_poison == (error("x").fault is Fault.CONTENT)


@pytest.mark.parametrize("error", CONCRETE, ids=lambda cls: cls.__name__)
def test_errors_that_halt_are_permanent_and_others_are_not(error: type[TidegateError]) -> None:
    """The table agrees with the families, which Airflow's decisions use."""
    halts = OUTCOMES[error("x").fault]["block"] is Outcome.HALT

    assert halts == issubclass(error, PermanentError)


@pytest.mark.parametrize("error", [OSError("gone"), MemoryError(), ValueError("x"), KeyboardInterrupt(), SystemExit(0)])
def test_errors_that_are_not_ours_are_unknown(error: BaseException) -> None:
    """So they never leave rows out."""
    assert fault_of(error) is Fault.UNKNOWN


def test_the_document_shows_the_table_that_the_code_uses() -> None:
    """Each row: the fault with its errors, and the outcome under each policy."""
    rows = re.findall(r"^\| `(\w+)`: ([^|]+) \| ([^|]+) \| (\w+) \| (\w+) \| (\w+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    shown = {name: (meaning, set(re.findall(r"\w+", classes)), outcomes) for name, meaning, classes, *outcomes in rows}
    expected = {
        fault.name: (
            fault.value,
            {error("x").code for error in CONCRETE if error.fault is fault} or {"any", "other", "exception"},
            [OUTCOMES[fault][policy].name for policy in POLICIES],
        )
        for fault in Fault
    }

    assert shown == expected
    for outcome in Outcome:
        assert f"- `{outcome.name}`: {outcome.value}." in DOCUMENT.read_text()


TRACEBACKS = {
    "a value": (
        'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: bad\n SQLSTATE: 38000',
        ["ValueError"],
    ),
    "no message": (
        'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    y\n    ^\nMemoryError\n',
        ["MemoryError"],
    ),
    "a class of a library": (
        "Traceback (most recent call last):\n  File 'x'\npsycopg2.OperationalError: gone",
        ["psycopg2.OperationalError"],
    ),
    "one while another was handled": (
        "Traceback (most recent call last):\n  File 'x'\nOSError: gone\n\nDuring handling of the above exception, another "
        "exception occurred:\n\nTraceback (most recent call last):\n  File 'x'\nValueError: wrapped",
        ["OSError", "ValueError"],
    ),
    "a message of many lines": ("Traceback (most recent call last):\n  File 'x'\nValueError: a\nOSError: b", ["ValueError"]),
    "no traceback": ("Python worker exited unexpectedly (crashed)", []),
}


@pytest.mark.parametrize(("text", "raised"), TRACEBACKS.values(), ids=TRACEBACKS.keys())
def test_the_exceptions_of_a_python_worker_are_found_by_their_classes(text: str, raised: list[str]) -> None:
    """All exceptions count: a value that only looks bad because a file could not be read is not bad."""
    assert [name for name, _ in raised_in_python(f"[PYTHON_EXCEPTION] An exception was thrown: {text}")] == raised
