"""Keeps copies of a reference's files, each under its digest, so that a version can be read after the files were replaced."""

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.sources.files.content import digest_of, open_file
from state_store.errors import SourceUnreadable

PART = ".{}.{}.part"  # the name of a copy until it is complete


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


def _copy(path: Path, target: Path, sha256: str, within: Path | None) -> bool:
    """Copy a file; give the copy its name, and return True, only if it has the expected content."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(PART.format(target.name, uuid.uuid4().hex))
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
