"""Every error survives pickling, and belongs to one family."""

import inspect
import pickle

from tests.store import errors
from tidegate.state_store.base.errors import PermanentError, RetryableError, TidegateError

ERRORS = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, TidegateError)]


def test_every_error_survives_pickling() -> None:
    for error in ERRORS:
        copy = pickle.loads(pickle.dumps(error("flights 7:2 is wrong.")))
        assert (type(copy), str(copy)) == (error, "flights 7:2 is wrong.")


def test_every_error_belongs_to_one_family() -> None:
    """An error is retryable or permanent, never both; only the root and AttemptFenced, whose work goes on, are neither."""
    for error in ERRORS:
        families = [family for family in (RetryableError, PermanentError) if issubclass(error, family)]
        assert len(families) == (0 if error in (TidegateError, errors.AttemptFenced) else 1), error
        assert issubclass(error, Exception)
        assert (error.__doc__ or "").strip().endswith("."), error
