"""A catalog of Iceberg tables in an SQLite file, one for each test process; and one that does not answer."""

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

NAME = "lake"
# PyIceberg reads the environment once, when it is imported.
FOLDER = Path(tempfile.mkdtemp(prefix="tidegate-iceberg-"))
os.environ |= {
    "PYICEBERG_CATALOG__LAKE__TYPE": "sql",
    "PYICEBERG_CATALOG__LAKE__URI": f"sqlite:///{FOLDER}/catalog.db",
    "PYICEBERG_CATALOG__LAKE__WAREHOUSE": f"file://{FOLDER}/warehouse",
    "PYICEBERG_CATALOG__AWAY__URI": "http://127.0.0.1:9",
}


@cache
def catalog() -> Any:
    """The catalog, as those who write tables use it."""
    from pyiceberg.catalog import load_catalog  # noqa: PLC0415 - after the environment is set

    return load_catalog(NAME)
