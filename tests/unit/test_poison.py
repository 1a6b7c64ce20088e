"""The table of outcomes agrees with the classes of errors, and lets content alone leave rows out."""

import inspect
import pickle

import pytest

from tests.store import errors
from tidegate.jobs.engine.poison import OUTCOMES, Outcome
from tidegate.state_store.base.errors import Fault, PermanentError, RetryableError, TidegateError

ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, TidegateError)]


@pytest.mark.promise("decision:0024")
def test_nothing_but_content_ever_leaves_rows_out_and_each_error_has_a_fault_and_one_family() -> None:
    skipping = [(fault, policy) for fault, row in OUTCOMES.items() for policy in row if row[policy] is Outcome.SKIP]
    assert skipping == [(Fault.CONTENT, "skip")]
    for kind in ERRORS:
        error = kind("flights 7:2 is wrong.")
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (kind, "flights 7:2 is wrong.")
        families = isinstance(error, RetryableError) + isinstance(error, PermanentError)
        assert families == (kind not in (TidegateError, errors.AttemptFenced)), kind
        assert (kind.__doc__ or "").strip().endswith("."), kind
        if kind not in (TidegateError, RetryableError, PermanentError):
            assert error.fault is not Fault.UNKNOWN
            assert error.is_poison == (error.fault is Fault.CONTENT)
            assert (OUTCOMES[error.fault]["block"] is Outcome.HALT) == isinstance(error, PermanentError), error
