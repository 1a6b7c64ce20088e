"""Java libraries that tests need, from Maven Central; without a way there, their tests are skipped."""

import pytest

from tidegate.stack.components import java_libraries
from tidegate.state_store.base.errors import PermanentError


def fetch_or_skip(*packages: str) -> None:
    """Fetch libraries into the user's cache; skip the test if Maven Central does not answer or lacks them."""
    try:
        java_libraries.fetch(packages)
    except PermanentError as error:
        if "cannot be fetched from Maven Central" not in str(error):
            raise
        pytest.skip(str(error))
