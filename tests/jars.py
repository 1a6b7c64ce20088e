"""Java libraries that tests need, from Maven Central; without a way there, their tests are skipped."""

import pytest

from tidegate.stack import maven
from tidegate.state_store.errors import PermanentError


def fetch_or_skip(*packages: str) -> None:
    """Fetch libraries into the user's cache; skip the test if Maven Central does not answer or lacks them."""
    try:
        maven.fetch(packages)
    except PermanentError as error:
        if "cannot be fetched from Maven Central" not in str(error):
            raise
        pytest.skip(str(error))
