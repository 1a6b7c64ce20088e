"""Partition columns, read from folder names as Hive, Spark and pyarrow write them: ``dt=2024-01-01/hour=07/x.parquet``."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote

from tidegate.jobs.sources.column_types import SparkType, parse_type

if TYPE_CHECKING:
    import pyarrow as pa

# Hive's name for NULL; Spark also writes it for an empty text.
NOTHING = "__HIVE_DEFAULT_PARTITION__"
IN_THE_FILES = "Leave it out of the source's partitions, and put it into the schema, to read what the files say."
_NESTED = ("array", "map", "struct", "binary")


@dataclass(frozen=True)
class PartitionColumns:
    """Columns that a source takes from folder names; `zone` is for timestamps without one.

    Raises: ValueError for a type that folder names cannot hold.
    """

    schema: Mapping[str, str]
    zone: str = "UTC"

    def __post_init__(self) -> None:
        for name, kind in self.kinds.items():
            if kind.family in _NESTED:
                raise ValueError(f"{name} is {kind.name}, which no folder's name can be")

    @cached_property
    def kinds(self) -> dict[str, SparkType]:
        """Return the types by column name."""
        return {name: parse_type(text) for name, text in self.schema.items()}

    @property
    def types(self) -> "dict[str, pa.DataType]":
        """Return the Arrow types by column name."""
        return {name: kind.arrow for name, kind in self.kinds.items()}

    def values_of(self, name: str) -> "dict[str, pa.Array]":
        """Return each column's value for a file, as an array of length 1.

        Raises: ValueError if the folder names lack, repeat or misspell a value.
        """
        texts_of: dict[str, str | None] = {}
        folders = folders_of(name) if self.schema else []
        for column in self.schema:
            texts = [text for key, text in folders if key == column]
            if len(texts) != 1:
                many = "none" if not texts else "more than one"
                raise ValueError(f"{many} of its folders is called {column}=..., which the source's partitions declare")
            if texts[0] == "":
                raise ValueError(f"its folder {column}= has no value: NULL is written {column}={NOTHING}")
            texts_of[column] = None if texts[0] == NOTHING else _decoded(column, texts[0])
        return self.parsed(texts_of)

    def parsed(self, texts: Mapping[str, str | None]) -> "dict[str, pa.Array]":
        """Return the value of each column whose text is given, or None, as an array of length 1.

        Raises: ValueError for a text that is no value of its column's type.
        """
        import pyarrow as pa  # noqa: PLC0415 - declaring a pipeline must not load pyarrow

        from tidegate.jobs.sources.files.formats.records import typed_values  # noqa: PLC0415

        values: dict[str, pa.Array] = {}
        for column, text in texts.items():
            values[column], bad = typed_values.from_texts(self.kinds[column], pa.array([text], pa.string()), self.zone)
            if bad:
                raise ValueError(f"partition {column}={text}: {bad[0]}")
        return values


def folders_of(name: str) -> list[tuple[str, str]]:
    """Return the columns and raw values in a file's folder names."""
    parts = [folder.partition("=") for folder in PurePosixPath(name).parts[:-1]]
    return [(unquote(key), value) for key, sign, value in parts if sign]


def undeclared(name: str, schema: Mapping[str, str]) -> dict[str, str]:
    """Return the schema's columns, with types, that a file's folder names also hold."""
    columns = {key for key, _ in folders_of(name)}
    return {column: kind for column, kind in schema.items() if column in columns}


def advice_on(in_folders: Mapping[str, str]) -> str:
    """Return advice on a missing column, if these columns of the schema, with types, are named by folders; else nothing."""
    declaration = ", ".join(f"{column!r}: {kind!r}" for column, kind in in_folders.items())
    return (
        f" The names of its folders have it: declare partitions={{{declaration}}} instead of it in the schema."
        if in_folders
        else ""
    )


def _decoded(column: str, text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ValueError(f"its folder {column}={text} is not UTF-8 once its percent signs are decoded") from None
