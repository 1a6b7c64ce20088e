"""A file is its name and content: it counts once, and changed content is refused by name. Batches are counted here."""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests import steps
from tests.crashes import Crash
from tests.sources.conftest import PER_NAME, Inbox
from tests.sources.in_process import SCHEMA, meanwhile, overwrite, raises
from tidegate.explain.why import explain
from tidegate.jobs import Files, Pipeline
from tidegate.jobs.engine import committing
from tidegate.jobs.sources.files import done_folder
from tidegate.jobs.sources.files.done_folder import DoneFolder
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import HoleDetected, MalformedRecord, SourceChanged

pytestmark = pytest.mark.usefixtures("counted_here")

OPAQUE = replace(PER_NAME, kind="opaque")  # which suits every kind of source
BOTH_KINDS = pytest.mark.parametrize("kind", ["transactional", "opaque"])


def declare(inbox: Inbox, kind: Any = "opaque", *, version: int = 1, **source: Any) -> Pipeline:
    usual: dict[str, Any] = {"folder": "inbox", "glob": "**/*.csv", "format": "csv", "schema": SCHEMA, "max_files": 2}
    return inbox.declare(Files(**usual | source, kind=kind), states={"per_name": OPAQUE}, version=version)


def lines(*names: str) -> str:
    return "name,amount\n" + "".join(f"{name},1\n" for name in names)


def once(names: str) -> dict[str, tuple[int, int]]:
    return dict.fromkeys(names, (1, 1))


@BOTH_KINDS
def test_a_file_does_not_count_again_by_another_name(inbox: Inbox, kind: str) -> None:
    pipeline = declare(inbox, kind, glob="**/*.{csv,CSV}", max_files=1)
    for name in ("a", "site/b"):
        inbox.write(f"{name}.csv", lines(name[-1]))
    (inbox.folder / "hard link.csv").hardlink_to(inbox.folder / "a.csv")
    inbox.run(pipeline, "first")
    (inbox.folder / "a.csv").rename(inbox.folder / "A.CSV")
    (inbox.folder / "site").rename(inbox.folder / "moved")
    assert inbox.run(pipeline, "second") == []
    run_without_reading(inbox, pipeline)
    backup = shutil.copytree(inbox.folder, inbox.folder.parent / "backup")
    shutil.rmtree(inbox.folder)
    shutil.copytree(backup, inbox.folder)
    assert inbox.run(pipeline, "after a restore") == []
    assert inbox.counts(pipeline) == once("ab")
    inbox.write("d.csv", lines("d"))
    inbox.run(pipeline, "beside")
    shutil.copy2(inbox.folder / "d.csv", inbox.folder / "copy.csv")  # which has the same time
    inbox.run(pipeline, "third")
    assert inbox.counts(pipeline) == once("ab") | {"d": (2, 2)}


def test_a_link_to_a_file_with_a_time_of_whole_seconds_counts_once(inbox: Inbox) -> None:
    pipeline = declare(inbox, glob="{l*/,}*.csv", max_files=1)
    file, linked = inbox.write("a.csv", lines("a")), inbox.write("real/b.csv", lines("b"))
    for path in (file, linked):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    (inbox.folder / "hard link.csv").hardlink_to(file)
    (inbox.folder / "l1").symlink_to("real")
    assert inbox.run(pipeline, "first") == [1, 2]
    (inbox.folder / "l1").rename(inbox.folder / "l2")
    assert inbox.run(pipeline, "second") == []
    shutil.copy2(linked, inbox.folder / "copy.csv")
    inbox.run(pipeline, "third")
    assert inbox.counts(pipeline) == once("a") | {"b": (2, 2)}


@pytest.mark.parametrize("most", [1, 2])
def test_a_copy_of_a_file_that_was_moved_away_counts(inbox: Inbox, most: int) -> None:
    pipeline = declare(inbox, done_folder="done", max_files=1)
    shutil.copy2(inbox.write("a.csv", lines("a")), inbox.folder / "b.csv")
    for run_id in ("first", "second"):
        steps.complete(inbox.settings, pipeline, *steps.plan(inbox.settings, pipeline, run_id=run_id, max_batches=most))
    assert inbox.counts(pipeline) == {"a": (2, 2)}


@patch("tidegate.state_store.store.FILES_AT_ONCE", 3)
def test_a_file_with_a_new_time_is_read_again_once(inbox: Inbox) -> None:
    """Touched, or put back after it was gone: its time is recorded. The ledger is asked for some names at a time."""
    pipeline = declare(inbox, max_files=100)
    for name in "abcdefghij":
        inbox.write(f"{name}.csv", lines(name))
    inbox.run(pipeline, "first")
    for file in inbox.folder.iterdir():
        file.touch()
    assert inbox.run(pipeline, "touched") == []
    run_without_reading(inbox, pipeline)
    gone = inbox.folder.rename(inbox.settings.home / "gone")
    inbox.write("k.csv", lines("k"))
    assert inbox.run(pipeline, "meanwhile") == [2]
    shutil.copytree(gone, inbox.folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    assert inbox.run(pipeline, "put back") == []
    run_without_reading(inbox, pipeline)
    assert inbox.counts(pipeline) == once("abcdefghijk")


def run_without_reading(inbox: Inbox, pipeline: Pipeline) -> None:
    """Check that a run finds nothing new, and knows all files by their stamps."""
    with patch("tidegate.jobs.sources.files.plan.digest_of", lambda path: pytest.fail(f"{path} was read")):
        assert inbox.run(pipeline, "by stamps") == []


@pytest.mark.promise("decision:0022")
@pytest.mark.parametrize(("kind", "grows"), [("transactional", True), ("opaque", False)])
def test_a_file_that_changed_after_it_counted_is_named(inbox: Inbox, store: StateStore, kind: str, grows: bool) -> None:
    pipeline = declare(inbox, kind)
    file = inbox.write("1.csv", lines("a", "b"))
    inbox.run(pipeline, "first")
    counted = file.read_bytes()
    file.write_text(lines("a", "b", "c") if grows else lines("x", "y"))
    inbox.write("2.csv", lines("d"))
    message = raises(SourceChanged, lambda: inbox.run(pipeline, "second"))
    (why,) = explain(store, pipeline, ask_source=store).causes
    assert store.last_opened("inbox").txid == 1
    assert (why.code, why.error, why.severity) == ("PLAN_FAILED", "SOURCE_CHANGED", "error")
    assert f": SOURCE_CHANGED: {file} has changed since it counted in txid 1: " in why.sentence
    assert message.startswith(f"{file} has changed since it counted in txid 1: ")
    assert (f"its first {len(counted)} bytes" in message) == grows
    if grows:
        file.write_bytes(counted)
        inbox.write("1.rest.csv", lines("c"))
    else:
        file.rename(inbox.folder / "3.csv")
    inbox.run(pipeline, "third")
    assert inbox.counts(pipeline) == once("abcd" if grows else "abdxy")


def test_planned_files_of_another_folder_are_not_passed_over(inbox: Inbox, store: StateStore) -> None:
    pipeline = declare(inbox)
    first = inbox.write("a.csv", lines("a"))
    inbox.plan(pipeline, "first")
    store.fail_attempt(store.start_attempt(pipeline.spec, 1, "test"), "test")  # so that the next one plans the batch again
    moved = declare(inbox, folder="elsewhere", version=2)
    elsewhere = inbox.put("elsewhere", [("b", 1)], name="b.csv").with_name("a.csv")
    with pytest.raises(SourceChanged, match=f"There is no {elsewhere}: the batch was planned with this file of inbox,"):
        steps.process(inbox.settings, moved, 1, owner="test")
    assert steps.history(inbox.settings, 1).status.phase == "halted"
    first.rename(elsewhere)
    inbox.run(moved, "second")
    assert inbox.counts(moved) == once("ab")


@pytest.mark.promise("I11")
@pytest.mark.parametrize("take", [shutil.copy2, Path.replace, lambda other, file: overwrite(file, other.read_bytes())])
def test_a_file_of_the_same_size_and_time_is_read_and_named(inbox: Inbox, take: Callable[[Path, Path], object]) -> None:
    pipeline = declare(inbox)
    file, other = inbox.write("line\nend.csv", lines("a")), inbox.write("../other", lines("z"))
    os.utime(other, ns=(0, file.stat().st_mtime_ns))
    inbox.run(pipeline, "first")
    take(other, file)
    raises(SourceChanged, lambda: inbox.run(pipeline, "second"), r"line\\nend\.csv has changed since it counted in txid 1")


@BOTH_KINDS
def test_a_file_that_was_skipped_and_then_completed_is_read(inbox: Inbox, store: StateStore, kind: str) -> None:
    pipeline = declare(inbox, kind, max_files=1)
    file = inbox.write("1.csv", half := "name,amount\na,1\nb,ha")
    inbox.plan(pipeline, "run")
    assert "is no int" in inbox.refused(pipeline, MalformedRecord)
    file.write_text(lines("a", "b"))
    store.skip_batch(pipeline.spec, 1, "me", "half a line")
    assert inbox.run(pipeline, "second") == [2]
    assert inbox.counts(pipeline) == once("ab")
    file.write_text(half)
    assert inbox.run(pipeline, "third") == []
    file.write_text(lines("a", "b", "c"))
    raises(SourceChanged, lambda: inbox.run(pipeline, "fourth"), "has changed since it counted in txid 2")


def redo(inbox: Inbox, pipeline: Pipeline, txid: int) -> None:
    steps.redo(inbox.settings, pipeline, txid, owner="me", reason="test")


def redo_and_die(inbox: Inbox, pipeline: Pipeline) -> None:
    """Redo the first batch in a process that dies before its ack."""
    with patch.object(committing, "ack", side_effect=Crash), pytest.raises(Crash):
        redo(inbox, pipeline, 1)


@pytest.mark.parametrize("done", [None, "done"])
def test_a_redo_reads_the_files_of_its_batch_again(inbox: Inbox, done: str | None) -> None:
    """Also files that its commit has moved away, or that the glob no longer takes; without one, their rows would be gone."""
    pipeline = declare(inbox, done_folder=done)
    for name in "bcd":
        inbox.write(f"{name}.csv", lines(name))
    (inbox.folder / "d.csv").rename(inbox.folder / "d.txt")
    (inbox.folder / "d.csv").symlink_to("d.txt")
    inbox.run(pipeline, "first")
    inbox.write("a.csv", lines("a"))
    redo(inbox, pipeline, 2)
    assert inbox.counts(pipeline) == once("abcd")
    assert inbox.run(pipeline, "second") == []
    redo(inbox, pipeline, 2)
    redo(inbox, pipeline, 2)
    assert inbox.counts(pipeline) == once("abcd")
    lying = inbox.settings.home / "done" / "2" / "d.csv" if done else inbox.folder / "d.csv"
    lying.unlink()
    raises(SourceChanged, lambda: redo(inbox, pipeline, 2), r"d\.csv has counted in txid 2, and is gone")
    lying.write_text(lines("d"))
    redo(inbox, declare(inbox, done_folder=done, glob="*.CSV", version=2), 2)
    assert inbox.counts(pipeline) == once("abcd")


def test_a_redo_that_dies_before_its_ack_owes_it(inbox: Inbox) -> None:
    """The next run moves the files that the redo took: one that grew in the folder would count twice."""
    pipeline = declare(inbox, done_folder="done", max_files=10)
    inbox.write("1.csv", lines("a"))
    inbox.run(pipeline, "first")
    new = inbox.write("2.csv", lines("b"))
    redo_and_die(inbox, pipeline)
    assert new.exists()
    assert inbox.run(pipeline, "second") == []
    assert not new.exists(), "its ack was overdue"
    assert inbox.counts(pipeline) == once("ab")


def test_a_late_ack_of_the_commit_before_a_redo_is_not_that_of_the_redo(inbox: Inbox) -> None:
    """The redo's process died, so its ack is due: a file that it took, and that grew in the folder, would count twice."""
    pipeline = declare(inbox, done_folder="done", max_files=10)
    inbox.write("1.csv", lines("a"))
    new = inbox.folder / "2.csv"

    def grow_and_redo() -> None:
        new.write_text(lines("b"))
        redo_and_die(inbox, pipeline)

    with meanwhile(StateStore, "note_ack", grow_and_redo):
        inbox.run(pipeline, "first")
    assert inbox.counts(pipeline) == once("ab")
    new.write_text(lines("b", "c"))
    raises(SourceChanged, lambda: inbox.run(pipeline, "second"), r"2\.csv has changed since it counted in txid 1")
    new.write_text(lines("b"))
    assert inbox.run(pipeline, "third") == []
    assert not new.exists(), "its ack was overdue"
    assert inbox.counts(pipeline) == once("ab")


def test_a_name_comes_again_with_new_content(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = declare(inbox, "transactional", done_folder="done")
    for number, name in enumerate(("a", "b", "c"), start=1):
        file = inbox.write("export.csv", lines(name))
        os.utime(file, (1_000_000_000, 1_000_000_000))  # as large, and as old as the one before
        assert inbox.run(pipeline, name) == [number]
        assert not file.exists()
    shutil.rmtree(inbox.settings.home / "done")
    file.write_text(lines("b"))
    with caplog.at_level(logging.WARNING):
        assert inbox.run(pipeline, "restored") == []
    assert "export.csv in txid 2. Move them away." in caplog.text
    file.write_text(lines("d"))
    assert inbox.run(pipeline, "new") == [4]
    assert inbox.counts(pipeline) == once("abcd")


def test_a_done_folder_ahead_of_the_ledger_is_refused(inbox: Inbox) -> None:
    pipeline = declare(inbox, done_folder="done", max_files=1)
    inbox.write("1.csv", lines("a"))
    inbox.run(pipeline, "first")
    moved = inbox.write("../done/2/2.csv", lines("b"))
    inbox.write("3.csv", lines("c"))
    with pytest.raises(HoleDetected, match=r"has files of txid 2, but this ledger has committed no more than 1"):
        inbox.run(pipeline, "restored")
    moved.rename(inbox.folder / "2.csv")
    assert inbox.run(pipeline, "as advised") == [2, 3]
    assert inbox.counts(pipeline) == once("abc")


@pytest.fixture
def other_file_system(tmp_path: Path) -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK) or Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is no other file system here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_file_that_left_its_file_system_takes_no_other_with_its_inode_number(
    inbox: Inbox, store: StateStore, other_file_system: Path
) -> None:
    """Unless it had other names there: these are the same file."""
    pipeline = declare(inbox, done_folder=f"{other_file_system}/done", max_files=1)
    for name in "ab":
        os.utime(inbox.write(f"{name}.csv", lines(name)), (1_000_000_000, 1_000_000_000))
    (inbox.folder / "hard link.csv").hardlink_to(inbox.folder / "b.csv")
    assert inbox.run(pipeline, "first") == [1, 2]
    other = inbox.write("c.csv", lines("a"))
    os.utime(other, (1_000_000_000, 1_000_000_000))
    ((_, (counted,)),) = store.taken_files("inbox", ["a.csv"], 3)
    store.note_times("inbox", [replace(counted, inode=f"{other.stat().st_ino}.0")])  # as file systems give numbers again
    assert [inbox.run(pipeline, run_id) for run_id in ("second", "third")] == [[3], []]
    assert inbox.counts(pipeline) == {"a": (2, 2), "b": (1, 1)}


def test_a_move_to_another_file_system_is_whole_or_not_at_all(tmp_path: Path, other_file_system: Path) -> None:
    folder, file, place = DoneFolder(tmp_path, other_file_system), tmp_path / "sub" / "1.csv", other_file_system / "4" / "sub"
    file.parent.mkdir()
    place.mkdir(parents=True)
    (place / ".1.csv.part").write_text("fi")

    def entry(content: str) -> dict[str, Any]:
        file.write_text(content)
        described = {"name": "sub/1.csv", "size": len(content), "mtime_ns": file.stat().st_mtime_ns}
        return {**described, "sha256": sha256(content.encode()).hexdigest()}

    first = entry("first")
    with patch.object(shutil, "copystat", side_effect=PermissionError):
        folder.move(4, first)
    assert (place / "1.csv").read_text() == "first"
    assert not file.exists()
    other = entry("another")
    folder.move(4, first)
    assert file.read_text() == "another"
    raises(SourceChanged, lambda: folder.move(5, first), "so it is not moved")
    replaced = patch.object(shutil, "copyfile", lambda old, copy: (old.write_text("new"), copy.write_text("new")))
    with replaced, pytest.raises(SourceChanged, match="was replaced while it was being moved"):
        folder.move(5, other)
    assert file.read_text() == "new"
    file.write_text("another")
    for txid, moved in ((5, other), (4, first), (5, other)):
        folder.move(txid, moved)
    last, new = entry("last"), tmp_path / "new"
    new.write_text("took its name")
    dies = patch.object(done_folder, "_put_back", side_effect=Crash)
    with meanwhile(Path, "replace", lambda: new.rename(file)), dies, pytest.raises(Crash):
        folder.move(6, last)
    raises(SourceChanged, lambda: folder.move(6, last), "was replaced while it was being moved")
    folder.move(6, last)
    assert (file.read_text(), (place.parents[1] / "5/sub/1.csv").read_text()) == ("took its name", "another")
    last = entry("last")
    with patch.object(Path, "unlink", side_effect=Crash), pytest.raises(Crash):
        folder.move(7, last)
    folder.move(7, last)
    assert sorted(folder.txids()) == [4, 5, 6, 7]
    assert [path.name for path in (*other_file_system.rglob("*"), *tmp_path.rglob("*")) if path.is_file()] == ["1.csv"] * 4


def test_a_young_file_is_named_and_delays_no_other(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = declare(inbox, min_age_seconds=600, max_files=5)
    for name, age in {"1": 7200, "2": 0, "3": 7200, "4": -(10**8), "5": -1200}.items():
        os.utime(inbox.write(f"{name}.csv", lines(name)), (time.time() - age,) * 2)
    with caplog.at_level(logging.WARNING):
        assert inbox.run(pipeline, "first") == [1]
    assert "not planned yet, because they changed less than 600 s ago and may still be written: 2.csv, 5.csv" in caplog.text
    assert inbox.counts(pipeline) == once("134")
    for name in "25":
        os.utime(inbox.folder / f"{name}.csv", (1_000_000_000, 1_000_000_000))
    assert inbox.run(pipeline, "second") == [2]
