"""A catalog of Iceberg tables in an SQLite file, one for each test process."""

import atexit
import os
import shutil
import tempfile
from functools import cache

_folder = tempfile.mkdtemp(prefix="tidegate-iceberg-")
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
os.environ |= {  # PyIceberg reads the environment once, when it is imported
    "PYICEBERG_CATALOG__LAKE__TYPE": "sql",
    "PYICEBERG_CATALOG__LAKE__URI": f"sqlite:///{_folder}/catalog.db",
    "PYICEBERG_CATALOG__LAKE__WAREHOUSE": f"file://{_folder}/warehouse",
}

from pyiceberg.catalog import Catalog, load_catalog  # noqa: E402

__all__ = ["catalog", "load_catalog"]


@cache
def catalog() -> Catalog:
    return load_catalog("lake")
