"""A catalog of Iceberg tables in an SQLite file, one for each test process."""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import psutil

NAME = "lake"
FOLDERS = Path(tempfile.gettempdir()) / f"tidegate-iceberg-{os.getuid()}"
FOLDER = FOLDERS / str(os.getpid())


def _begin() -> None:
    FOLDERS.mkdir(mode=0o700, exist_ok=True)
    for folder in FOLDERS.iterdir():
        if not psutil.pid_exists(int(folder.name)) or folder == FOLDER:
            shutil.rmtree(folder, ignore_errors=True)
    FOLDER.mkdir()
    atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
    os.environ |= {
        "PYICEBERG_CATALOG__LAKE__TYPE": "sql",
        "PYICEBERG_CATALOG__LAKE__URI": f"sqlite:///{FOLDER}/catalog.db",
        "PYICEBERG_CATALOG__LAKE__WAREHOUSE": f"file://{FOLDER}/warehouse",
    }


_begin()  # PyIceberg reads the environment once, when it is imported

from pyiceberg.catalog import Catalog, load_catalog  # noqa: E402

__all__ = ["catalog", "load_catalog"]


@cache
def catalog() -> Catalog:
    return load_catalog(NAME)
