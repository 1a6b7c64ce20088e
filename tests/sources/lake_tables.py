"""Tables of names and amounts as delta-rs and PyIceberg write them, and as both read them: the tests' oracles."""

import atexit
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from tests.sources.in_process import SCHEMA, Table
from tidegate.jobs import Delta, Iceberg
from tidegate.state_store import Settings

_folder = tempfile.mkdtemp(prefix="tidegate-iceberg-")
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
os.environ |= {  # PyIceberg reads the environment once, when it is imported
    "PYICEBERG_CATALOG__LAKE__TYPE": "sql",
    "PYICEBERG_CATALOG__LAKE__URI": f"sqlite:///{_folder}/catalog.db",
    "PYICEBERG_CATALOG__LAKE__WAREHOUSE": f"file://{_folder}/warehouse",
}

from pyiceberg.catalog import Catalog, load_catalog  # noqa: E402
from pyiceberg.io.pyarrow import _dataframe_to_data_files  # noqa: E402

TYPES = pa.schema([("name", pa.string()), ("amount", pa.int32())])
Row = tuple[str | None, int]
_numbers = count(1)


@cache
def catalog() -> Catalog:
    return load_catalog("lake")


def rows_of(*rows: Row) -> pa.Table:
    return pa.table([[name for name, _ in rows], [amount for _, amount in rows]], schema=TYPES)


def parquet_of(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def path_of(url: str) -> Path:
    return Path(urlsplit(url).path)


def in_order(found: pa.Table) -> list[tuple]:
    return sorted((tuple(row.values()) for row in found.to_pylist()), key=repr)


class DeltaLakeTable(Table):
    """A table in the project folder, which comes into being with its first rows."""

    def __init__(self, settings: Settings, name: str = "sales") -> None:
        super().__init__(settings, Delta(name, schema=SCHEMA))
        self.folder = settings.home / name

    @property
    def delta(self) -> DeltaTable:
        return DeltaTable(str(self.folder))

    def append(self, *rows: Row, mode: Any = "append", more: dict[str, Any] | None = None, **options: Any) -> None:
        table = rows_of(*rows)
        for name, values in (more or {}).items():
            table = table.append_column(name, values)
        write_deltalake(str(self.folder), table, mode=mode, **options)

    def there(self, *columns: str) -> list[tuple]:
        return in_order(self.delta.to_pyarrow_table(columns=list(columns) or None))

    def log(self, version: int) -> Path:
        return self.folder / "_delta_log" / f"{version:020}.json"

    def write_log(self, version: int, *actions: Any) -> None:
        lines = (action if isinstance(action, str) else json.dumps(action) for action in actions)
        self.log(version).write_text("\n".join(lines))


class IcebergTable(Table):
    """A table in the catalog of tests, without rows at first."""

    def __init__(self, settings: Settings) -> None:
        self.name = f"sales.number_{next(_numbers)}"
        super().__init__(settings, Iceberg(f"lake.{self.name}", schema=SCHEMA))
        catalog().create_namespace_if_not_exists("sales")
        self.create()
        self.folder = path_of(self.iceberg.location())

    def create(self, **properties: str) -> None:
        catalog().create_table(self.name, schema=TYPES, properties=properties)

    def partition(self) -> None:
        self.iceberg.update_spec().add_identity("name").commit()

    @property
    def iceberg(self) -> Any:
        return catalog().load_table(self.name)

    @property
    def snapshots(self) -> list[int]:
        return [entry.snapshot_id for entry in self.iceberg.history()]

    def append(self, *rows: Row) -> None:
        """Add rows, in one snapshot and one file, or a file per partition."""
        self.iceberg.append(rows_of(*rows))

    def there(self, *columns: str) -> list[tuple]:
        return in_order(self.iceberg.scan(selected_fields=columns or ("*",)).to_arrow())

    def compact(self) -> None:
        """Write all files again as one, as rewrite_data_files does: by a snapshot that replaces files and changes no row."""
        iceberg = self.iceberg
        with iceberg.transaction() as transaction, transaction.update_snapshot().overwrite() as update:
            for task in iceberg.scan().plan_files():
                update.delete_data_file(task.file)
            for file in _dataframe_to_data_files(iceberg.metadata, iceberg.scan().to_arrow(), iceberg.io):
                update.append_data_file(file)
        self._change(lambda metadata: metadata["snapshots"][-1]["summary"].update(operation="replace"))

    def expire(self, *snapshots: int) -> None:
        """Let snapshots expire as Iceberg's own library does: their children still name them, and their manifests' lists go."""
        for number in snapshots:
            path_of(self.iceberg.snapshot_by_id(number).manifest_list).unlink()

        def left(metadata: dict[str, Any]) -> None:
            for name in ("snapshots", "snapshot-log"):
                metadata[name] = [entry for entry in metadata[name] if entry["snapshot-id"] not in snapshots]

        self._change(left)

    def _change(self, change: Callable[[dict[str, Any]], None]) -> None:
        path = path_of(self.iceberg.metadata_location)
        metadata = json.loads(path.read_text())
        change(metadata)
        path.write_text(json.dumps(metadata))
