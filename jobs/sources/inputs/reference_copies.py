"""Keeps copies of a reference's files or rows, each under its digest, so that a version can be read when it is replaced."""

import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.jobs.sources.files.content import digest_of, open_file
from tidegate.state_store.base.errors import SourceUnreadable

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = "rows.parquet"
PART = ".{}.part"  # the name of a copy until it is complete; without the file's own, which may be as long as a name can be


def keep(path: Path, file: Mapping[str, Any], folder: Path, within: Path | None) -> dict[str, Any] | None:
    """Copy a file into the folder, unless it is there; return its entry with the copy's name, None if it changes meanwhile.

    A copy gets its name when it is complete, so several planners at a time, or one that dies, do no harm.

    Raises: SourceUnreadable if the folder cannot be written, or the file cannot be read.
    """
    name = f"{file['sha256']}/{file['name']}"
    target = folder / name
    try:
        is_there = target.exists() and target.stat().st_size == file["size"]
        if not is_there and not _copy(path, target, file["sha256"], within):
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = _write(schema, rows, folder)
        status = target.stat()
    except OSError as error:
        raise SourceUnreadable(
            f"Rows of a reference cannot be written to {folder}: {error.strerror}. Let the account that plans write there."
        ) from error
    entry = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    return {"name": str(target.relative_to(folder)), **entry, "sha256": target.parent.name}


def _write(schema: "pa.Schema", rows: "Iterable[pa.RecordBatch]", folder: Path) -> Path:
    """Write rows into a Parquet file, and return it: a file in a folder that has its digest as its name."""
    import pyarrow.parquet as pq  # noqa: PLC0415 - declaring a pipeline must not load pyarrow

    part = folder / PART.format(uuid.uuid4().hex)
    try:
        with part.open("wb") as file:
            with pq.ParquetWriter(file, schema) as writer:
                for batch in rows:
                    writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        with open_file(part) as content:
            target = folder / digest_of(content) / ROWS
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _copy(path: Path, target: Path, sha256: str, within: Path | None) -> bool:
    """Copy a file; give the copy its name, and return True, only if it has the expected content."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(PART.format(uuid.uuid4().hex))
    try:
        with open_file(path, within) as content, part.open("wb") as copy:
            shutil.copyfileobj(content, copy)
            copy.flush()
            os.fsync(copy.fileno())
        with open_file(part) as copied:
            if digest_of(copied) != sha256:
                return False
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return True
