"""The tree of errors is documented, and every error survives pickling."""

import inspect
import pickle

from tests.store import errors
from tidegate.state_store.base.errors import PermanentError, RetryableError, TidegateError

ERRORS = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, TidegateError)]


def documented() -> dict[str, str | None]:
    """Return each class that the module's docstring lists, and the class above it by its indentation."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        indentation = len(line) - len(line.lstrip())
        if indentation < 4 or not (words := line.split()) or not words[0].isidentifier():
            continue
        above = [(depth, name) for depth, name in above if depth < indentation]
        parents[words[0]] = above[-1][1] if above else None
        above.append((indentation, words[0]))
    return parents


def test_the_docstring_shows_the_whole_tree() -> None:
    """Every class is listed under its parent, and nothing that does not exist is listed."""
    actual = {cls.__name__: None if cls is TidegateError else cls.__base__.__name__ for cls in ERRORS}
    assert documented() == actual


def test_every_error_survives_pickling_with_its_attributes() -> None:
    """Airflow and Spark pass errors between processes; their attributes are kept."""
    for error in ERRORS:
        copy = pickle.loads(pickle.dumps(error("flights 7:2 is wrong.", pipeline="flights", txid=7, attempt=2)))
        assert (type(copy), str(copy)) == (error, "flights 7:2 is wrong.")
        assert (copy.pipeline, copy.txid, copy.attempt) == ("flights", 7, 2)


def test_every_error_belongs_to_one_family() -> None:
    """An error is retryable or permanent, never both; only the root and AttemptFenced, whose work goes on, are neither."""
    for error in ERRORS:
        families = [family for family in (RetryableError, PermanentError) if issubclass(error, family)]
        assert len(families) == (0 if error in (TidegateError, errors.AttemptFenced) else 1), error
        assert issubclass(error, Exception)
        assert (error.__doc__ or "").strip().endswith("."), error
