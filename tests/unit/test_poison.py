"""The table of outcomes is complete, agrees with the classes of errors, and is the documented one."""

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

from tests.store import errors
from tidegate.jobs.engine.poison import OUTCOMES, Outcome
from tidegate.jobs.pipeline import PoisonPolicy
from tidegate.state_store.base.errors import Fault, PermanentError, TidegateError

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "poison.md"
ERRORS = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, TidegateError)]
FAMILIES = [TidegateError, errors.RetryableError, PermanentError]
CONCRETE = [cls for cls in ERRORS if cls not in FAMILIES]
POLICIES = get_args(PoisonPolicy)


def test_the_table_has_a_cell_for_each_fault_and_policy() -> None:
    assert set(OUTCOMES) == set(Fault)
    assert all(tuple(sorted(outcomes)) == tuple(sorted(POLICIES)) for outcomes in OUTCOMES.values())


@pytest.mark.promise("decision:0024")
def test_nothing_but_content_ever_leaves_rows_out() -> None:
    skipping = [(fault, policy) for fault, row in OUTCOMES.items() for policy in row if row[policy] is Outcome.SKIP]
    assert skipping == [(Fault.CONTENT, "skip")]


@pytest.mark.parametrize("error", CONCRETE, ids=lambda cls: cls.__name__)
def test_every_error_has_a_fault(error: type[TidegateError]) -> None:
    assert error("x").fault is not Fault.UNKNOWN
    assert error("x").is_poison == (error("x").fault is Fault.CONTENT)


@pytest.mark.parametrize("error", CONCRETE, ids=lambda cls: cls.__name__)
def test_errors_that_halt_are_permanent_and_others_are_not(error: type[TidegateError]) -> None:
    halts = OUTCOMES[error("x").fault]["block"] is Outcome.HALT
    assert halts == issubclass(error, PermanentError)


def test_the_document_shows_the_table_that_the_code_uses() -> None:
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
