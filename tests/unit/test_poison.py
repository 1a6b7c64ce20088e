"""The table of outcomes agrees with the classes of errors, and lets content alone leave rows out."""

import inspect
import pickle
from typing import get_args

import pytest

from tests.store import errors
from tidegate.jobs.engine.poison import OUTCOMES, Outcome
from tidegate.jobs.pipeline import PoisonPolicy
from tidegate.state_store.base.errors import Fault, PermanentError, TidegateError

ERRORS = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, TidegateError)]
FAMILIES = [TidegateError, errors.RetryableError, PermanentError]
CONCRETE = [cls for cls in ERRORS if cls not in FAMILIES]
POLICIES = get_args(PoisonPolicy)


@pytest.mark.promise("decision:0024")
def test_nothing_but_content_ever_leaves_rows_out() -> None:
    skipping = [(fault, policy) for fault, row in OUTCOMES.items() for policy in row if row[policy] is Outcome.SKIP]
    assert skipping == [(Fault.CONTENT, "skip")]


@pytest.mark.promise("decision:0024")
def test_every_error_has_a_fault_one_family_and_survives_pickling() -> None:
    for kind in ERRORS:
        error = kind("flights 7:2 is wrong.")
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (kind, "flights 7:2 is wrong.")
        families = [family for family in (errors.RetryableError, PermanentError) if isinstance(error, family)]
        assert len(families) == (0 if kind in (TidegateError, errors.AttemptFenced) else 1), kind
        assert (kind.__doc__ or "").strip().endswith("."), kind
    for error in (kind("x") for kind in CONCRETE):
        assert error.fault is not Fault.UNKNOWN
        assert error.is_poison == (error.fault is Fault.CONTENT)
        assert (OUTCOMES[error.fault]["block"] is Outcome.HALT) == isinstance(error, PermanentError), error
