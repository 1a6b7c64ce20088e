"""A file that another one replaces under the same name, size and time is another file, and what was skipped has not counted."""

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import steps
from tests.sources.conftest import Inbox
from tests.sources.in_process import counted_here
from tests.sources.test_file_identity import HEADER, KINDS, counts, declare, files, lines
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable

__all__ = ["counted_here"]  # a fixture

pytestmark = pytest.mark.usefixtures("counted_here")


def copied(file: Path, other: Path) -> None:
    shutil.copy2(other, file)


def moved(file: Path, other: Path) -> None:
    other.replace(file)


def written(file: Path, other: Path) -> None:
    """As a program that writes into the file, and puts back its time."""
    file.write_bytes(other.read_bytes())
    os.utime(file, ns=(0, other.stat().st_mtime_ns))


def other_of(file: Path) -> Path:
    other = file.parent.parent / "other"
    other.write_text(file.read_text().replace("a", "z"))
    os.utime(other, ns=(0, file.stat().st_mtime_ns))
    return other


@pytest.mark.promise("I11")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replace", [copied, moved, written], ids=lambda f: f.__name__)
def test_a_file_of_the_same_size_and_time_is_read_and_named(
    inbox: Inbox, kind: str, replace: Callable[[Path, Path], None]
) -> None:
    pipeline = declare(inbox, files(kind))
    file = inbox.write("1.csv", HEADER + "a,1\n")
    inbox.run(pipeline, "first")
    replace(file, other_of(file))

    with pytest.raises(SourceChanged, match=r"1\.csv has changed since it counted in txid 1"):
        inbox.run(pipeline, "second")


def test_only_what_counted_is_moved_to_the_done_folder(inbox: Inbox) -> None:
    pipeline = declare(inbox, files("transactional", done_folder=str(inbox.folder.parent / "done")))
    file = inbox.write("1.csv", HEADER + "a,1\n")
    inbox.plan(pipeline, "run")
    steps.process(inbox.settings, pipeline, 1, owner="run")
    with StateStore.connect(inbox.settings) as store:
        store.commit_batch(pipeline.spec, 1, "run")
    moved(file, other_of(file))

    with pytest.raises(SourceChanged, match=r"1\.csv has changed since it counted in txid 1"):
        inbox.run(pipeline, "second")
    assert "z,1" in file.read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_compressed_file_that_was_broken_and_is_repaired_is_read_by_the_advice(inbox: Inbox, kind: str) -> None:
    """What was planned cannot be read, so it is of no use to put it back."""
    pipeline = declare(inbox, files(kind, glob="*.gz"))
    whole = gzip.compress(lines("a", "b").encode())
    file = inbox.write("1.csv.gz", whole[:-5])
    with pytest.raises(SourceUnreadable, match="cannot be read to its end"):
        inbox.run(pipeline, "first")
    file.write_bytes(whole)
    if kind == "transactional":
        with pytest.raises(SourceChanged, match=r"1\.csv\.gz changed .* give the batch up: tidegate skip PIPELINE TXID"):
            inbox.run(pipeline, "second")
        with StateStore.connect(inbox.settings) as store:
            store.skip_batch(pipeline.spec, 1, "me", "it was broken")
    inbox.run(pipeline, "third")
    assert counts(inbox, pipeline) == {"a": (1, 1), "b": (1, 1)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_skipped_and_then_completed_is_read(inbox: Inbox, kind: str) -> None:
    pipeline = inbox.declare(files(kind, max_files=1), states=declare(inbox, files(kind)).states)
    file = inbox.write("1.csv", HEADER + "a,1\nb,ha")
    half = file.read_bytes()
    inbox.plan(pipeline, "run")
    with pytest.raises(Exception, match="is no int"):
        steps.process(inbox.settings, pipeline, 1, owner="run")
    file.write_text(lines("a", "b"))
    with StateStore.connect(inbox.settings) as store:
        store.skip_batch(pipeline.spec, 1, "me", "half a line")

    assert inbox.run(pipeline, "second") == [2]
    assert counts(inbox, pipeline) == {"a": (1, 1), "b": (1, 1)}
    file.write_bytes(half)
    assert inbox.run(pipeline, "third") == []
    file.write_text(lines("a", "b", "c"))
    with pytest.raises(SourceChanged, match="has changed since it counted in txid 2"):
        inbox.run(pipeline, "fourth")
