"""Reads what a plan needs of an Iceberg table: its snapshots, and the data files that each of them has or adds.

PyIceberg asks the catalog and reads the table's metadata. A snapshot names a list of manifests, and a manifest names data files
and what the snapshot that wrote it did with them. None of these is ever written again, so a number of files is a place in a
snapshot. What the parts mean is said by Iceberg's table specification (iceberg.apache.org/spec).

At most the entries of one manifest are in memory.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidegate.jobs.sources.column_types import in_another_case
from tidegate.jobs.sources.files.stores.object_places import check_url, is_url, without_password
from tidegate.state_store.base.errors import RangeExpired, SourceUnavailable, SourceUnreadable

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile as FileEntry
    from pyiceberg.manifest import ManifestEntry, ManifestFile
    from pyiceberg.schema import Schema
    from pyiceberg.table.snapshots import Snapshot

FILE_SCHEMES = {"file:": "", "s3://": "s3a://", "s3n://": "s3a://"}  # as a catalog writes them, and as they are read here
NAME_MAPPING = "schema.name-mapping.default"  # a table with it may have files that other programs wrote
DATA_PATH = "write.data.path"
NAMES_DATA = 0  # a manifest's content
# The states of a manifest's files: new in its snapshot, there, gone.
ADDED, THERE, DELETED = ("ADDED",), ("ADDED", "EXISTING"), ("DELETED",)


@dataclass(frozen=True)
class DataFile:
    """A data file of a snapshot: the place below which it lies, its name there, its size, and columns that it must have.

    These columns are those with figures in the manifest, and those of its partition, which files as Hive writes them lack.
    """

    root: str
    name: str
    size: int
    columns: frozenset[str]


class IcebergTable:
    """A table as its catalog has it at one moment."""

    def __init__(self, name: str) -> None:
        """Load the table.

        Raises: SourceUnreadable if there is no such table or catalog; SourceUnavailable if the catalog does not answer.
        """
        self.name = name
        self._table = _load(name)
        metadata = self._table.metadata
        self._snapshots: dict[int, Snapshot] = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
        self._listed: tuple[int | None, list[ManifestFile]] = (None, [])
        self._columns: dict[int, str] = _columns_of(self._table.schema())
        self.uuid = str(metadata.table_uuid)
        self.root = self._place(metadata.location)
        self._roots = [self.root]
        if path := metadata.properties.get(DATA_PATH):
            self._roots.insert(0, self._place(path))

    def snapshot(self, number: int) -> "Snapshot | None":
        """Return a snapshot; None if it was expired, or never there."""
        return self._snapshots.get(number)

    def history(self) -> list["Snapshot"]:
        """Return the snapshots that led to the present state of the branch main, the oldest that is left first."""
        snapshots: list[Snapshot] = []
        current = self._table.metadata.current_snapshot_id
        while current is not None and (snapshot := self.snapshot(current)):
            snapshots.append(snapshot)
            current = snapshot.parent_snapshot_id
        return snapshots[::-1]

    def check(self, columns: Mapping[str, str]) -> None:
        """Check that the declared columns mean the same in all of the table's files.

        Raises: SourceUnreadable.
        """
        metadata = self._table.metadata
        schema = self._table.schema()
        names = [field.name for field in schema.fields]
        if lacking := [name for name in columns if name not in names]:
            case = in_another_case(lacking, names)
            raise SourceUnreadable(f"{self.name} has no column {lacking[0]}{case}; it has {', '.join(names)}.")
        self._check_names(columns)
        for field in schema.fields:
            if field.name in columns and field.initial_default is not None:
                raise SourceUnreadable(
                    f"{self.name} has a default value for {field.name}, in files that lack it. Such columns are not read."
                )
        if mapping := metadata.properties.get(NAME_MAPPING):
            self._check_mapping(json.loads(mapping), columns)

    def _check_names(self, columns: Mapping[str, str]) -> None:
        """Refuse a column that has had another name, or a name that was another column's."""
        numbers, names, declared = defaultdict[str, set[int]](set), defaultdict[int, set[str]](set), set[str]()
        for schema in self._table.metadata.schemas:
            for number, column in _columns_of(schema).items():
                name = schema.find_column_name(number) or ""
                numbers[name].add(number)
                names[number].add(name)
                declared |= {name} if column in columns else set()
        for name in sorted(declared):
            if len(numbers[name]) > 1 or any(len(names[number]) > 1 for number in numbers[name]):
                raise SourceUnreadable(
                    f"{self.name} has had several columns under the name {name}, or several names for it: it was renamed, or "
                    "dropped and added again, and its files have what was true when they were written. Such columns are not "
                    "read. Leave it out, or read a table that was written again."
                )

    def _check_mapping(self, mapping: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
        """Refuse other names for columns in files that other programs wrote."""
        for field in mapping:
            names = field.get("names", [])
            if set(names) & set(columns) and (len(names) > 1 or any(len(f["names"]) > 1 for f in field.get("fields", ()))):
                raise SourceUnreadable(
                    f"{self.name} has files in which {' or '.join(names)} are names of one column ({NAME_MAPPING}). Such "
                    "columns are not read."
                )

    def effect(self, snapshot: "Snapshot") -> tuple[str, int, int]:
        """Return a snapshot's operation, how many data files it adds, and how many it removes or deletes single rows of.

        Raises: RangeExpired, SourceUnreadable.
        """
        removes = sum(self._count(each, *(DELETED if _has_data(each) else ADDED)) for each in self._own_manifests(snapshot))
        operation = snapshot.summary.operation.value if snapshot.summary else "an unknown operation"
        return operation, self.count(snapshot, whole=False), removes

    def count(self, snapshot: "Snapshot", *, whole: bool) -> int:
        """Return the number of data files that a snapshot has, as a whole, or adds.

        Raises: RangeExpired, SourceUnreadable.
        """
        manifests, states = (self._manifests(snapshot), THERE) if whole else (self._own_manifests(snapshot), ADDED)
        return sum(self._count(each, *states) for each in manifests if _has_data(each))

    def files(self, snapshot: "Snapshot", after: int, *, whole: bool) -> Iterator[DataFile]:
        """Yield the data files that a snapshot has, or adds, in the order of its manifests, except for the first ones.

        Raises: RangeExpired; SourceUnreadable, before the first file if there are deletes of single rows in the whole.
        """
        manifests, states = (self._manifests(snapshot), THERE) if whole else (self._own_manifests(snapshot), ADDED)
        if whole and any(not _has_data(each) and self._count(each, *THERE) for each in manifests):
            raise SourceUnreadable(
                f"{self.name} has deletes of single rows in snapshot {snapshot.snapshot_id}, which are not read here. Let "
                "rewrite_data_files (delete-file-threshold 1) and rewrite_position_delete_files apply them, or begin with what "
                "is added later: starting_snapshot."
            )
        for manifest in filter(_has_data, manifests):
            count = self._count(manifest, *states)
            if count > after:
                entries = [entry for entry in self._entries(manifest) if entry.status.name in states]
                if count != len(entries):
                    raise SourceUnreadable(
                        f"{manifest.manifest_path} of {self.name} names {len(entries)} files, and {count} by its list of "
                        "manifests."
                    )
                yield from map(self._data_file, entries[after:])
            after = max(0, after - count)

    def _count(self, manifest: "ManifestFile", *states: str) -> int:
        """Return the number of a manifest's files in these states, by the list of manifests or, without it there, its own."""
        counts = [getattr(manifest, f"{state.lower()}_files_count") for state in states]
        return sum(entry.status.name in states for entry in self._entries(manifest)) if None in counts else sum(counts)

    def _own_manifests(self, snapshot: "Snapshot") -> list["ManifestFile"]:
        """Return the manifests in which a snapshot says what it does; the others are those of earlier ones."""
        return [each for each in self._manifests(snapshot) if each.added_snapshot_id == snapshot.snapshot_id]

    def _manifests(self, snapshot: "Snapshot") -> list["ManifestFile"]:
        """Return a snapshot's manifests; those of the last one asked for are kept."""
        if self._listed[0] != snapshot.snapshot_id:
            with self._reading(snapshot.manifest_list):
                self._listed = snapshot.snapshot_id, snapshot.manifests(self._table.io)
        return self._listed[1]

    def _entries(self, manifest: "ManifestFile") -> list["ManifestEntry"]:
        with self._reading(manifest.manifest_path):
            return manifest.fetch_manifest_entry(self._table.io, discard_deleted=False)

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """Explain why a part of the table's metadata cannot be read."""
        try:
            yield
        except FileNotFoundError:
            raise RangeExpired(
                f"{path} of {self.name} is gone, so its snapshot was expired meanwhile, or removed otherwise. Put it back, or "
                "declare the next generation, and raise the pipeline's version."
            ) from None
        except PermissionError as error:
            raise SourceUnreadable(f"{path} of {self.name} cannot be read: {_in_one_line(error)}. Make it readable.") from error
        except OSError as error:
            raise SourceUnavailable(f"{path} of {self.name} cannot be read now: {_in_one_line(error)}.") from error
        except Exception as error:
            raise SourceUnreadable(f"{path} of {self.name} cannot be read: {_in_one_line(error)}.") from error

    def _data_file(self, entry: "ManifestEntry") -> DataFile:
        file = entry.data_file
        path = _readable_scheme(file.file_path)
        if file.file_format.name != "PARQUET":
            raise SourceUnreadable(f"{path} of {self.name} is {file.file_format.name}: only Parquet files are read.")
        for root in self._roots:
            if path.startswith(f"{root}/") and not {"", ".", ".."} & set((name := path[len(root) + 1 :]).split("/")):
                return DataFile(root, name, file.file_size_in_bytes, self._columns_in(file))
        raise SourceUnreadable(
            f"{path} of {self.name} lies outside the table's place, {self.root}. Such files are not read: write them again."
        )

    def _columns_in(self, file: "FileEntry") -> frozenset[str]:
        """Return the columns that a data file must have."""
        spec = self._table.specs()[file.spec_id]
        partitioned_by = [field.source_id for field in spec.fields if str(field.transform) == "identity"]
        numbers = (*partitioned_by, *(file.column_sizes or ()), *(file.value_counts or ()))
        return frozenset(self._columns[number] for number in numbers if number in self._columns)

    def _place(self, location: str) -> str:
        """Return where data files lie, as a folder of `Files`."""
        place = _readable_scheme(location).rstrip("/")
        try:
            if is_url(place):
                check_url(place)
        except ValueError as error:
            raise SourceUnreadable(
                f"{self.name} lies in {without_password(location)}, which cannot be read: {error}."
            ) from None
        return place


def _load(name: str) -> Any:
    """Return PyIceberg's table."""
    try:
        from pyiceberg.catalog import load_catalog  # noqa: PLC0415 - a declaration must not load it
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError  # noqa: PLC0415
    except ImportError:
        raise SourceUnreadable(
            f"{name} is an Iceberg table, which is planned by PyIceberg: pip install pyiceberg, where the tasks of Dags run."
        ) from None
    catalog, _, table = name.partition(".")
    try:
        return load_catalog(catalog).load_table(table)
    except (NoSuchTableError, NoSuchNamespaceError) as error:
        raise SourceUnreadable(
            f"Catalog {catalog} has no table {table} ({_in_one_line(error)}). Correct the pipeline's Iceberg(...)."
        ) from None
    except ValueError as error:  # of the catalog's configuration
        raise SourceUnreadable(
            f"Catalog {catalog} cannot be used: {_in_one_line(error)}. PyIceberg reads it from .pyiceberg.yaml or from "
            f"PYICEBERG_CATALOG__{catalog.upper()}__URI and others, where the tasks of Dags run."
        ) from None
    except Exception as error:
        raise SourceUnavailable(f"Catalog {catalog} does not answer for {table}: {_in_one_line(error)}.") from error


def _in_one_line(error: Exception) -> str:
    """Return what kind of error it is, and the beginning of its message."""
    first = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _columns_of(schema: "Schema") -> dict[int, str]:
    """Return the column to which each number belongs: its own, and those of what is nested in it."""
    from pyiceberg.schema import Schema  # noqa: PLC0415

    return {number: field.name for field in schema.fields for number in Schema(field).field_ids}


def _has_data(manifest: "ManifestFile") -> bool:
    """Return whether a manifest names data files, and not files that delete rows."""
    return int(manifest.content) == NAMES_DATA  # in tables of version 1, PyIceberg has a number and no name


def _readable_scheme(path: str) -> str:
    """Return a location with the scheme by which it is read here."""
    for written, read in FILE_SCHEMES.items():
        if path.startswith(written):
            rest = path[len(written) :]
            return f"{read}{rest}" if read else f"/{rest.lstrip('/')}"
    return path
