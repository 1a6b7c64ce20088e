"""A file is its name and content: it counts once, and changed content is refused by name.

Ledger, plans, commits and acks are real; batches are read and counted in this process.
"""

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

import pytest

from tests import steps
from tests.sources.conftest import SCHEMA, Inbox
from tests.sources.in_process import counted_here
from tests.store import Attempt
from tidegate.explain.why import explain
from tidegate.jobs import Count, Files, Pipeline, State, Sum
from tidegate.jobs.sources.files.done_folder import DoneFolder
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import HoleDetected, SourceChanged

__all__ = ["counted_here"]  # a fixture

pytestmark = pytest.mark.usefixtures("counted_here")

HEADER = "name,amount\n"
OPAQUE = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")}, kind="opaque")
KINDS = ["transactional", "opaque"]


def files(kind: Any = "opaque", **source: Any) -> Files:
    return Files("inbox", **{"glob": "**/*.csv", "format": "csv", "schema": SCHEMA, "max_files": 2, **source}, kind=kind)


def declare(inbox: Inbox, source: Files) -> Pipeline:
    """Declare the pipeline with an opaque state, which suits every kind of source."""
    return inbox.declare(source, states={"per_name": OPAQUE})


def lines(*names: str) -> str:
    """Return the content of a file: a record of 1 for each name."""
    return HEADER + "".join(f"{name},1\n" for name in names)


def touch(inbox: Inbox, _pipeline: Pipeline | None = None) -> None:
    """Change the times, as a restore or rsync without -t does."""
    for file in inbox.folder.rglob("*.csv"):
        file.touch()


def replace_files(inbox: Inbox, _pipeline: Pipeline | None = None) -> None:
    for file in inbox.folder.rglob("*.csv"):
        aside = shutil.copy2(file, inbox.folder.parent)
        file.unlink()
        shutil.copy2(aside, file)


def delete_and_restore(inbox: Inbox, pipeline: Pipeline) -> None:
    """Delete all but the newest file; the next run sees that; then restore them from a backup."""
    backup = shutil.copytree(inbox.folder, inbox.folder.parent / "backup")
    for file in sorted(inbox.folder.rglob("*.csv"))[:-1]:
        file.unlink()
    inbox.write("site/07.csv", lines("g"))
    inbox.run(pipeline, "meanwhile")
    shutil.copytree(backup, inbox.folder, dirs_exist_ok=True, copy_function=shutil.copyfile)


def move_away_and_back(inbox: Inbox, pipeline: Pipeline) -> None:
    away = inbox.folder.parent / "away"
    (inbox.folder / "site").rename(away)
    inbox.write("07.csv", lines("g"))
    inbox.run(pipeline, "meanwhile")
    away.rename(inbox.folder / "site")


@pytest.mark.sampled(4)
@pytest.mark.promise("decision:0022")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("happens", [touch, replace_files, delete_and_restore, move_away_and_back], ids=lambda f: f.__name__)
def test_content_counts_once_after_changes_to_its_file(inbox: Inbox, kind: str, happens: Callable[..., None]) -> None:
    pipeline = declare(inbox, files(kind))
    for name in ("site/01", "site/02", "site/03", "other/04"):
        inbox.write(f"{name}.csv", lines(name))
    inbox.run(pipeline, "first")
    happens(inbox, pipeline)
    assert inbox.run(pipeline, "second") == []
    inbox.write("site/09.csv", lines("late"))
    inbox.write("00.csv", lines("early"))
    inbox.run(pipeline, "third")

    read = {line.split(",")[0] for file in inbox.folder.rglob("*.csv") for line in file.read_text().splitlines()[1:]}
    assert inbox.counts(pipeline) == dict.fromkeys(read, (1, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_does_not_count_again_by_another_name(inbox: Inbox, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = declare(inbox, files(kind, glob="**/*.{csv,CSV}", max_files=1))
    for name in ("a", "site/b"):
        inbox.write(f"{name}.csv", lines(name[-1]))
    (inbox.folder / "hard link.csv").hardlink_to(inbox.folder / "a.csv")
    inbox.run(pipeline, "first")
    (inbox.folder / "a.csv").rename(inbox.folder / "A.CSV")
    (inbox.folder / "site").rename(inbox.folder / "moved")
    assert inbox.run(pipeline, "second") == []
    run_without_reading(inbox, pipeline, monkeypatch)
    backup = shutil.copytree(inbox.folder, inbox.folder.parent / "backup")
    shutil.rmtree(inbox.folder)
    shutil.copytree(backup, inbox.folder)
    assert inbox.run(pipeline, "after a restore") == []
    assert inbox.counts(pipeline) == {"a": (1, 1), "b": (1, 1)}

    inbox.write("d.csv", lines("d"))
    inbox.run(pipeline, "beside")
    shutil.copy2(inbox.folder / "d.csv", inbox.folder / "copy.csv")  # which has the same time
    inbox.run(pipeline, "third")
    assert inbox.counts(pipeline) == {"a": (1, 1), "b": (1, 1), "d": (2, 2)}


def run_without_reading(inbox: Inbox, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a run finds nothing new, and knows all files by their stamps."""
    with monkeypatch.context() as reading:
        reading.setattr("tidegate.jobs.sources.files.plan.digest_of", lambda path: pytest.fail(f"{path} was read"))
        assert inbox.run(pipeline, "by stamps") == []


def test_a_touched_file_is_read_again_once(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its new time is recorded, so that later plans recognize it; the ledger is asked for some names at a time."""
    monkeypatch.setattr("tidegate.state_store.store.FILES_AT_ONCE", 3)
    pipeline = declare(inbox, files(max_files=100))
    for number in range(0, 20, 2):
        inbox.write(f"{number:02}.csv", lines("a"))
    inbox.run(pipeline, "first")
    touch(inbox)
    assert inbox.run(pipeline, "second") == []
    run_without_reading(inbox, pipeline, monkeypatch)
    for number in range(1, 20, 2):
        inbox.write(f"{number:02}.csv", lines("b"))
    assert inbox.run(pipeline, "fourth") == [2]
    assert inbox.counts(pipeline) == {"a": (10, 10), "b": (10, 10)}


@pytest.mark.sampled(2)
@pytest.mark.promise("decision:0022")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grows", [True, False], ids=["grown", "overwritten"])
def test_a_file_that_changed_after_it_counted_is_named(inbox: Inbox, kind: str, grows: bool) -> None:
    pipeline = declare(inbox, files(kind))
    file = inbox.write("1.csv", lines("a", "b"))
    inbox.run(pipeline, "first")
    counted = file.read_bytes()
    file.write_text(lines("a", "b", "c") if grows else lines("x", "y"))
    inbox.write("2.csv", lines("d"))

    with pytest.raises(SourceChanged) as refusal:
        inbox.run(pipeline, "second")
    with StateStore.connect(inbox.settings) as store:
        (why,) = explain(store, pipeline, ask_source=store).causes
        assert store.last_opened("inbox").txid == 1
    assert (why.code, why.error, why.severity) == ("PLAN_FAILED", "SOURCE_CHANGED", "error")
    assert f": SOURCE_CHANGED: {file} has changed since it counted in txid 1: " in why.sentence
    assert str(refusal.value).startswith(f"{file} has changed since it counted in txid 1: ")
    assert (f"its first {len(counted)} bytes" in str(refusal.value)) == grows
    if grows:
        file.write_bytes(counted)
        inbox.write("1.rest.csv", lines("c"))
    else:
        file.rename(inbox.folder / "3.csv")
    inbox.run(pipeline, "third")
    expected = "abcd" if grows else "abdxy"
    assert inbox.counts(pipeline) == dict.fromkeys(expected, (1, 1))


def test_planned_files_of_another_folder_are_not_passed_over(inbox: Inbox) -> None:
    pipeline = declare(inbox, files("opaque"))
    first = inbox.write("a.csv", lines("a"))
    inbox.plan(pipeline, "first")
    with StateStore.connect(inbox.settings) as store:
        attempt = store.start_attempt(pipeline.spec, 1, "test")
        assert isinstance(attempt, Attempt)
        store.fail_attempt(attempt, "test")  # so that the next attempt plans the batch again
    moved = declare(inbox, replace(files("opaque"), folder="elsewhere"))
    elsewhere = inbox.settings.home / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "b.csv").write_text(lines("b"))
    gone = f"There is no {elsewhere / 'a.csv'}: the batch was planned with this file of inbox,"
    with pytest.raises(SourceChanged, match=gone):
        steps.process(inbox.settings, moved, 1, owner="test")
    assert steps.history(inbox.settings, 1).status.phase == "halted"
    first.rename(elsewhere / "a.csv")
    inbox.run(moved, "second")
    assert inbox.counts(moved) == {"a": (1, 1), "b": (1, 1)}


# ------------------------------------------------------------------------------------- another file of the same name


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
@pytest.mark.parametrize("replace", [copied, moved, written], ids=lambda f: f.__name__)
def test_a_file_of_the_same_size_and_time_is_read_and_named(inbox: Inbox, replace: Callable[[Path, Path], None]) -> None:
    pipeline = declare(inbox, files())
    file = inbox.write("1.csv", HEADER + "a,1\n")
    inbox.run(pipeline, "first")
    replace(file, other_of(file))

    with pytest.raises(SourceChanged, match=r"1\.csv has changed since it counted in txid 1"):
        inbox.run(pipeline, "second")


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
    assert inbox.counts(pipeline) == {"a": (1, 1), "b": (1, 1)}
    file.write_bytes(half)
    assert inbox.run(pipeline, "third") == []
    file.write_text(lines("a", "b", "c"))
    with pytest.raises(SourceChanged, match="has changed since it counted in txid 2"):
        inbox.run(pipeline, "fourth")


# ------------------------------------------------------------------------------------------------------ done folder


def redo(inbox: Inbox, pipeline: Pipeline, txid: int) -> None:
    steps.redo(inbox.settings, pipeline, txid, owner="me", reason="test")


@pytest.mark.parametrize("done", [None, "done"])
def test_a_redo_reads_the_files_of_its_batch_again(inbox: Inbox, done: str | None) -> None:
    """Also files that its commit has moved away, or that the glob no longer takes; without one, their rows would be gone."""
    pipeline = declare(inbox, files("opaque", done_folder=done))
    for name in "bcd":
        inbox.write(f"{name}.csv", lines(name))
    inbox.run(pipeline, "first")
    inbox.write("a.csv", lines("a"))
    redo(inbox, pipeline, 2)
    assert inbox.counts(pipeline) == dict.fromkeys("abcd", (1, 1))
    assert inbox.run(pipeline, "second") == []
    redo(inbox, pipeline, 2)
    redo(inbox, pipeline, 2)
    assert inbox.counts(pipeline) == dict.fromkeys("abcd", (1, 1))
    lying = inbox.settings.home / "done" / "2" / "d.csv" if done else inbox.folder / "d.csv"
    content = lying.read_bytes()
    lying.unlink()
    with pytest.raises(SourceChanged, match=r"d\.csv has counted in txid 2, and is gone"):
        redo(inbox, pipeline, 2)
    lying.write_bytes(content)
    changed = inbox.declare(replace(pipeline.source, glob="*.CSV"), states={"per_name": OPAQUE}, version=2)  # type: ignore[type-var]
    redo(inbox, changed, 2)
    assert inbox.counts(pipeline) == dict.fromkeys("abcd", (1, 1))


class Killed(BaseException):
    """The process was killed."""


def die(*_: object) -> None:
    raise Killed


def test_a_redo_that_dies_before_its_ack_owes_it(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run moves the files that the redo took: one that grew in the folder would count twice."""
    pipeline = declare(inbox, files("opaque", done_folder="done", max_files=10))
    inbox.write("1.csv", lines("a"))
    inbox.run(pipeline, "first")
    new = inbox.write("2.csv", lines("b"))
    with monkeypatch.context() as dying:
        dying.setattr("tidegate.jobs.engine.committing.ack", die)
        with pytest.raises(Killed):
            redo(inbox, pipeline, 1)
    assert inbox.counts(pipeline) == {"a": (1, 1), "b": (1, 1)}
    assert new.exists()

    assert inbox.run(pipeline, "second") == []
    assert not new.exists(), "its ack was overdue"
    redo(inbox, pipeline, 1)
    assert inbox.run(pipeline, "third") == []
    assert inbox.counts(pipeline) == {"a": (1, 1), "b": (1, 1)}


def test_a_late_ack_of_the_commit_before_a_redo_is_not_that_of_the_redo(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The redo's process died, so its ack is due: a file that it took, and that grew in the folder, would count twice."""
    pipeline = declare(inbox, files("opaque", done_folder="done", max_files=10))
    inbox.write("1.csv", lines("a"))
    new = inbox.folder / "2.csv"
    noted = StateStore.note_ack

    def redo_meanwhile(store: StateStore, *acked: Any) -> None:
        monkeypatch.setattr(StateStore, "note_ack", noted)
        inbox.write("2.csv", lines("b"))
        with monkeypatch.context() as dying:
            dying.setattr("tidegate.jobs.engine.committing.ack", die)
            with pytest.raises(Killed):
                redo(inbox, pipeline, 1)
        noted(store, *acked)

    monkeypatch.setattr(StateStore, "note_ack", redo_meanwhile)
    inbox.run(pipeline, "first")
    assert inbox.counts(pipeline) == {"a": (1, 1), "b": (1, 1)}
    new.write_text(lines("b", "c"))
    with pytest.raises(SourceChanged, match=r"2\.csv has changed since it counted in txid 1"):
        inbox.run(pipeline, "second")
    new.write_text(lines("b"))
    assert inbox.run(pipeline, "third") == []
    assert not new.exists(), "its ack was overdue"
    assert inbox.counts(pipeline) == {"a": (1, 1), "b": (1, 1)}


def test_a_name_comes_again_with_new_content(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = declare(inbox, files("transactional", done_folder="done"))
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

    assert inbox.counts(pipeline) == dict.fromkeys("abcd", (1, 1))


def test_a_done_folder_ahead_of_the_ledger_is_refused(inbox: Inbox) -> None:
    pipeline = declare(inbox, files(done_folder="done", max_files=1))
    inbox.write("1.csv", lines("a"))
    inbox.run(pipeline, "first")
    done = inbox.settings.home / "done"
    moved = done / "2" / "2.csv"
    moved.parent.mkdir()
    moved.write_text(lines("b"))
    inbox.write("3.csv", lines("c"))
    with pytest.raises(HoleDetected, match=r"has files of txid 2, but this ledger has committed no more than 1"):
        inbox.run(pipeline, "restored")
    moved.rename(inbox.folder / "2.csv")
    assert inbox.run(pipeline, "as advised") == [2, 3]
    assert inbox.counts(pipeline) == dict.fromkeys("abc", (1, 1))


@pytest.fixture
def other_file_system(tmp_path: Path) -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK) or Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is no other file system here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_move_to_another_file_system_is_whole_or_not_at_all(
    tmp_path: Path, other_file_system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DoneFolder(tmp_path, other_file_system)
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "1.csv"
    file.write_text("first")
    first = {"name": "sub/1.csv", "size": 5, "mtime_ns": file.stat().st_mtime_ns, "sha256": sha256(b"first").hexdigest()}
    (other_file_system / "4" / "sub").mkdir(parents=True)
    (other_file_system / "4" / "sub" / ".1.csv.part").write_text("fi")
    folder.move(4, first)
    assert (other_file_system / "4" / "sub" / "1.csv").read_text() == "first"
    assert not file.exists()
    file.write_text("another")
    folder.move(4, first)
    assert file.read_text() == "another"
    with pytest.raises(SourceChanged, match="so it is not moved"):
        folder.move(5, first)
    other = {**first, "size": 7, "sha256": sha256(file.read_bytes()).hexdigest()}
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(
            shutil, "copy2", lambda source, copy: (copy.write_bytes(source.read_bytes()), source.write_text("new"))
        )
        with pytest.raises(SourceChanged, match="was replaced while it was being moved"):
            folder.move(5, other)
    assert file.read_text() == "new"
    file.write_text("another")
    folder.move(5, other)
    folder.move(4, first)
    folder.move(5, other)
    assert sorted(folder.txids()) == [4, 5]
    assert (other_file_system / "4" / "sub" / "1.csv").read_text() == "first"
    assert sorted(path.name for path in other_file_system.rglob("*") if path.is_file()) == ["1.csv", "1.csv"]


# -------------------------------------------------------------------------------------------------------- young files


def test_a_young_file_is_named_and_delays_no_other(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = declare(inbox, files(min_age_seconds=3600, max_files=5))
    for name, age in {"1": 7200, "2": 0, "3": 7200, "4": -(10**8)}.items():
        os.utime(inbox.write(f"{name}.csv", lines(name)), (time.time() - age,) * 2)
    with caplog.at_level(logging.WARNING):
        assert inbox.run(pipeline, "first") == [1]
    assert "not planned yet, because they changed less than 3600 s ago and may still be written: 2.csv" in caplog.text
    assert inbox.counts(pipeline) == dict.fromkeys("134", (1, 1))
    os.utime(inbox.folder / "2.csv", (1_000_000_000, 1_000_000_000))
    assert inbox.run(pipeline, "second") == [2]
