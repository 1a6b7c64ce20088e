"""The names in a source's folder: which are read, once and in order, which wait or are left alone, and what they say."""

import logging
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from tidegate.jobs import Files
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.jobs.sources.files.identity import file_identity
from tidegate.jobs.sources.files.listing import list_files
from tidegate.jobs.sources.files.partition_columns import NOTHING, PartitionColumns
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SourceUnreadable

TEXT = Files("inbox", format="text")
NAMES = "a.json b.jsonl c{1,2}.csv d.part.csv e[1].csv x/f.json x/y/g.json _h.json _z/i.json j.part"


def write(folder: Path, *names: str, content: str = "") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*", ["a.json", "b.jsonl", "c{1,2}.csv", "d.part.csv", "e[1].csv"]),
        ("*.{json,jsonl}", ["a.json", "b.jsonl"]),
        ("{a,b,x/f}.json{,l}", ["a.json", "b.jsonl", "x/f.json"]),
        ("[!ab].*", ["d.part.csv"]),
        ("c[{]1,2[}].csv", ["c{1,2}.csv"]),
        ("x/**/*.json", ["x/f.json", "x/y/g.json"]),
        ("**/_*", ["_h.json"]),
        ("*.part", ["j.part"]),
    ],
)
def test_a_glob_matches_its_files(tmp_path: Path, pattern: str, names: list[str]) -> None:
    write(tmp_path, *NAMES.split())
    assert [name for name in list_files(tmp_path, pattern).names if (tmp_path / name).is_file()] == names


@pytest.mark.promise("security:author-of-data")
@pytest.mark.parametrize("name", ["absolute.txt", "folder/password.txt", "twice.txt"])
def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, "secret/password.txt", "inbox/a.txt")
    inbox = tmp_path / "inbox"
    (inbox / "file.txt").symlink_to("../secret/password.txt")
    (inbox / "absolute.txt").symlink_to(tmp_path / "secret/password.txt")
    (inbox / "twice.txt").symlink_to("file.txt")
    (inbox / "folder").symlink_to(tmp_path / "secret")
    assert {"absolute.txt", "folder"} <= set(list_files(inbox, "**/*").names)
    with pytest.raises(SourceUnreadable, match=r"leads out of .*inbox: it is really .*/secret.*follow_links=True"):
        file_identity(TEXT, inbox, name, 0)


def test_a_link_within_the_folder_is_read_unless_its_file_is(tmp_path: Path) -> None:
    write(tmp_path, "2024.json", "..data/config.json", "sub/x.json")
    links = {"config.json": "..data/config.json", "latest.json": "2024.json", "again": "sub", "around": ".", "sub/back": ".."}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    listing = list_files(tmp_path, "**/*.json")
    assert listing.names == ["2024.json", "config.json", "sub/x.json"]
    assert listing.left_alone["is a link to a file that is read by another name"] == ["again/x.json", "latest.json"]
    folders = listing.report().names["is a link to a folder that is read by another name"]
    assert folders == ["again/back/", "around/", "sub/back/"]
    assert file_identity(TEXT, tmp_path, "config.json", 0) is not None


def test_a_folder_is_read_once_its_marker_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    settings = Settings(home=tmp_path, min_file_age_seconds=0)
    source = Files("in", glob="**/*.csv", format="csv", schema={"name": "string"}, max_files=99, marker="_SUCCESS")

    def planned(*names: str) -> list[str]:
        write(tmp_path / "in", *names, content="name\na\n")
        metadata = coordinator_of(source, settings).initialize_transaction(1, None, None)
        return [file["name"] for file in metadata["files"]] if metadata else []

    assert planned("top.csv", "dt=1/a.csv", "dt=1/hour=1/b.csv", "dt=2/c.csv", "dt=2/hour=7/d.csv", "dt=3/e.csv") == []
    assert "not planned yet, because there is no _SUCCESS yet: ., dt=1, dt=1/hour=1 and 3 more" in caplog.text
    assert planned("dt=1/hour=1/_SUCCESS") == ["dt=1/hour=1/b.csv"]
    read = ["dt=1/hour=1/b.csv", "dt=2/c.csv", "dt=2/hour=7/d.csv"]
    assert planned("dt=2/_SUCCESS") == read
    assert planned("_SUCCESS", "dt=2/late.csv") == [*read, "dt=2/late.csv", "top.csv"]
    wait = "2 folder(s) with files have no _SUCCESS yet, such as dt=1: they are read once it is there."
    assert source.held_back(settings) == f"In {tmp_path / 'in'} {wait}"
    assert len(planned("dt=1/_SUCCESS", "dt=3/_SUCCESS")) == 7
    assert source.held_back(settings) is None


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "10%3A30%2F2%25", "10:30/2%"),
        ("string", "100%", "100%"),
        ("string", NOTHING, None),
        ("int", "07", 7),
        ("boolean", "true", True),
        ("date", "2024-01-05", date(2024, 1, 5)),
        ("timestamp", "2024-01-05 10%3A00%3A00.5", datetime(2024, 1, 5, 10, 0, 0, 500_000, UTC)),
    ],
)
def test_a_folder_name_gives_a_value_of_the_declared_type(kind: str, text: str, value: Any) -> None:
    values = PartitionColumns({"p": kind}).values_of(f"region=eu/p={text}/x.json")
    assert [found.to_pylist() for found in values.values()] == [[value]]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x.json", "none of its folders is called dt=..."),
        ("dt=2024-01-05/dt=2024-01-05/x.json", "more than one of its folders is called dt=..."),
        ("dt=/x.json", "has no value"),
        ("dt=2024-02-30/x.json", "'2024-02-30' is no date"),
        ("dt=%FF/x.json", "is not UTF-8 once its percent signs are decoded"),
        ("dt=null/x.json", "'null' is no date"),
    ],
)
def test_a_folder_name_without_such_a_value_is_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace(".", r"\.")):
        PartitionColumns({"dt": "date"}).values_of(name)
