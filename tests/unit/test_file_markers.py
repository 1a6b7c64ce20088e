"""Folders that wait for their marker, on a disk: what is planned, what is said of the rest, and which markers are refused."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tidegate.jobs import Files
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.state_store import Settings

DATA = "name,amount\na,1\n"


def inbox(**source: Any) -> Files:
    columns = {"name": "string", "amount": "int"}
    return Files(
        "in", **{"glob": "**/*.csv", "format": "csv", "schema": columns, "max_files": 99, "marker": "_SUCCESS", **source}
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a project folder, in which files count as complete at once."""
    (tmp_path / "in").mkdir()
    return Settings(home=tmp_path, min_file_age_seconds=0)


def write(settings: Settings, *names: str) -> None:
    for name in names:
        path = settings.home / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if path.name in ("_SUCCESS", "DONE") else DATA)


def planned(settings: Settings, source: Files) -> list[str]:
    metadata = coordinator_of(source, settings).initialize_transaction(1, None, None)
    return [file["name"] for file in metadata["files"]] if metadata else []


def test_a_folder_is_read_once_its_marker_is_there(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source = inbox()
    write(settings, "top.csv", "dt=1/a.csv", "dt=1/hour=1/b.csv", "dt=2/c.csv", "dt=2/hour=7/d.csv", "dt=3/e.csv")
    assert planned(settings, source) == []
    assert "not planned yet, because there is no _SUCCESS yet: ., dt=1, dt=1/hour=1 and 3 more" in caplog.text
    write(settings, "dt=1/hour=1/_SUCCESS")
    assert planned(settings, source) == ["dt=1/hour=1/b.csv"]
    write(settings, "dt=2/_SUCCESS")
    assert planned(settings, source) == ["dt=1/hour=1/b.csv", "dt=2/c.csv", "dt=2/hour=7/d.csv"]
    write(settings, "_SUCCESS", "dt=2/late.csv")
    assert planned(settings, source) == ["dt=1/hour=1/b.csv", "dt=2/c.csv", "dt=2/hour=7/d.csv", "dt=2/late.csv", "top.csv"]
    assert source.held_back(settings) == (
        f"In {settings.home / 'in'} 2 folder(s) with files have no _SUCCESS yet, such as dt=1: they are read once it is there."
    )
    write(settings, "dt=1/_SUCCESS", "dt=3/_SUCCESS")
    assert len(planned(settings, source)) == 7
    assert source.held_back(settings) is None


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"marker": ""}, "cannot have the marker ''"),
        ({"marker": "done.csv"}, r"would read the marker done.csv as data: \*\*/\*.csv matches it"),
    ],
)
def test_a_marker_that_cannot_work_is_refused(declared: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        inbox(**declared)
