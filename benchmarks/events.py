"""The events that most benchmarks count, by page (few keys) or by user (many)."""

import shutil
from pathlib import Path

import duckdb

PAGES, USERS = 1_000, 1_000_000


def write_events(folder: Path, files: int, rows: int, *, numbered: bool = False) -> None:
    """Write Parquet files with this number of rows each, `numbered` in column "at"; their content is always the same."""
    number_of_row = ", i AS at" if numbered else ""
    folder.mkdir(parents=True, exist_ok=True)
    with duckdb.connect() as connection:
        for number in range(files):
            first = number * rows
            connection.execute(
                f"""COPY (
                    SELECT (hash(i) % {USERS})::BIGINT AS user_id, 'page-' || (hash(i + 1) % {PAGES})::VARCHAR AS page,
                           (hash(i + 2) % 1000)::BIGINT AS amount{number_of_row}
                    FROM range({first}, {first + rows}) AS events(i)
                ) TO '{folder / f"{number:04d}.parquet"}' (FORMAT parquet, ROW_GROUP_SIZE 500000)"""
            )


def offer(files: list[Path], source: Path, name: str) -> None:
    """Copy files into a source's folder, under names that sort after all earlier ones. Hard links would count once."""
    source.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, source / f"{name}-{file.name}")


def expected(source: Path, key: str) -> list[tuple[object, int, int]]:
    """Return the expected state, computed by DuckDB from all files in the folder."""
    statement = f"SELECT {key}, count(*), sum(amount)::BIGINT FROM '{source}/*.parquet' GROUP BY ALL ORDER BY 1"
    with duckdb.connect() as connection:
        return connection.execute(statement).fetchall()
