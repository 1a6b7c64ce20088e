"""Finds the version of a reference that is there now, and keeps copies of its files or rows, each under its digest.

A copy can be read when the version has been replaced.
"""

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tidegate.jobs.sources import Coordinator, Source
from tidegate.jobs.sources.data_files import DataFilesCoordinator
from tidegate.jobs.sources.files.content import digest_of, open_file, stamp_of
from tidegate.jobs.sources.files.identity import entry_of, file_identity, with_identity
from tidegate.jobs.sources.files.listing import MOST_WAIT_SECONDS, is_young, young_files
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores.object_places import ObjectPath
from tidegate.jobs.sources.inputs.reference import MOST_FILES, Reference, check_count, names_of, objects_of
from tidegate.jobs.sources.postgres.source import PostgresTable
from tidegate.state_store.base.errors import SourceUnreadable
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

if TYPE_CHECKING:
    import pyarrow as pa

CoordinatorOf = Callable[[Source, Settings], Coordinator]
POLL_SECONDS = 0.1
ROWS = "rows.parquet"
PART = ".{}.part"  # the name of a copy until it is complete; without the file's own, which may be as long as a name can be


def version_of(reference: Reference, settings: Settings, coordinator_of: CoordinatorOf) -> SourceMetadata | None:
    """Return the files that are there now, with their digests; None while one of them may still be written.

    Raises: SourceUnreadable if there is none, there are too many, or one cannot be read; SourceUnavailable, AccessRefused;
    RangeExpired for a table's file that is gone; MalformedRecord for a value that does not fit.
    """
    declared = reference.files
    if isinstance(declared, PostgresTable):
        from tidegate.jobs.sources.postgres.read import arrow_schema, read_all  # noqa: PLC0415 - loads pyspark

        rows = read_all(declared.conninfo(settings, "plan"), declared.selection)
        return {"files": [keep_rows(arrow_schema(declared.selection), rows, settings.home / str(reference.keep_folder))]}
    if not isinstance(declared, Files):
        coordinator = coordinator_of(declared, settings)
        assert isinstance(coordinator, DataFilesCoordinator)
        of_table = coordinator.version(MOST_FILES + 1)
        check_count(declared.table, len(of_table["data_files"]) or 1)  # a table may be empty
        return of_table
    min_age = declared.min_age(settings)
    ends_at = time.monotonic() + (min_age + 1 if 0 < min_age <= MOST_WAIT_SECONDS else 0)
    while (version := _find_version(reference, declared, settings, min_age)) is None and time.monotonic() < ends_at:
        time.sleep(POLL_SECONDS)
    return version


def _find_version(reference: Reference, declared: Files, settings: Settings, min_age: int) -> SourceMetadata | None:
    if place := declared.objects():
        return _find_objects(declared, place, min_age)
    folder, names = names_of(declared, settings)
    if young_files(folder, names, min_age):
        return None
    files = [file_identity(declared, folder, name, min_age) for name in names]
    # A version has the files of one moment: none was added, removed or changed while the others were read.
    if names_of(declared, settings)[1] != names or not all(file and _is_unchanged(folder, file) for file in files):
        return None
    if reference.keep_folder is None:
        return {"files": files}
    kept, within = settings.home / reference.keep_folder, None if declared.follow_links else folder
    entries = [keep(folder / file["name"], file, kept, within) for file in files if file]
    return None if None in entries else {"files": entries}


def _find_objects(declared: Files, place: ObjectPath, min_age: int) -> SourceMetadata | None:
    listed = objects_of(declared, place)
    files = []
    for name, info in listed.items():
        if (whole := with_identity(declared, place / name, info)) is None:
            continue  # it stands for a folder; or it is gone, as the second listing shows
        if is_young(whole.mtime_ns, min_age):
            return None
        files.append(entry_of(declared, place, name, whole))
    # As on a disk: an object that was overwritten meanwhile has another size, time or ETag.
    return {"files": files} if None not in files and objects_of(declared, place) == listed else None


def _is_unchanged(folder: Path, file: Mapping[str, Any]) -> bool:
    try:
        status = (folder / file["name"]).stat()
    except OSError:
        return False
    return stamp_of(status).is_of(file)


def keep(path: Path, file: Mapping[str, Any], folder: Path, within: Path | None) -> dict[str, Any] | None:
    """Copy a file into the folder, unless it is there; return its entry with the copy's name, None if it changes meanwhile.

    A copy gets its name when it is complete, so several planners at a time, or one that dies, do no harm.

    Raises: SourceUnreadable if the folder cannot be written, or the file cannot be read.
    """
    name = f"{file['sha256']}/{file['name']}"
    target = folder / name
    try:
        if not target.exists() or target.stat().st_size != file["size"]:
            with open_file(path, within) as content:
                copy = partial(shutil.copyfileobj, content)
                if _write(folder, copy, lambda sha256: target if sha256 == file["sha256"] else None) is None:
                    return None
    except OSError as error:
        raise SourceUnreadable(
            f"{path} cannot be copied to {folder}: {error.strerror}. Let the account that plans read the one and write the "
            "other, or declare no keep_folder."
        ) from error
    return {**file, "name": name}


def keep_rows(schema: "pa.Schema", rows: "Iterable[pa.RecordBatch]", folder: Path) -> dict[str, Any]:
    """Write rows into a Parquet file in the folder, unless it is there; return its entry in the metadata of a batch.

    Raises: SourceUnreadable if the folder cannot be written; the errors of the rows.
    """
    import pyarrow.parquet as pq  # noqa: PLC0415 - declaring a pipeline must not load pyarrow

    def write(file: IO[bytes]) -> None:
        with pq.ParquetWriter(file, schema) as writer:
            for batch in rows:
                writer.write_batch(batch)

    try:
        target = _write(folder, write, lambda sha256: folder / sha256 / ROWS)
        assert target is not None
        status = target.stat()
    except OSError as error:
        raise SourceUnreadable(
            f"Rows of a reference cannot be written to {folder}: {error.strerror}. Let the account that plans write there."
        ) from error
    entry = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    return {"name": str(target.relative_to(folder)), **entry, "sha256": target.parent.name}


def _write(folder: Path, write: Callable[[IO[bytes]], object], place_of: Callable[[str], Path | None]) -> Path | None:
    """Write a file, and return it: it gets the place of its digest once it is complete, unless it is there, or has no place."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / PART.format(uuid.uuid4().hex)
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        with open_file(part) as content:
            target = place_of(digest_of(content))
        if target is not None and not (target.exists() and target.stat().st_size == part.stat().st_size):
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)
        return target
    finally:
        part.unlink(missing_ok=True)
