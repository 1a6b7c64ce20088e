"""Output shows data as it is: data moves no cursor, changes no colour, and hides nothing."""

import json
import logging
import os
import pwd
import unicodedata
from datetime import datetime
from pathlib import Path

import pytest

from tidegate import output
from tidegate.commands.act.operator_name import operator

HOSTILE = "\x1b]0;pwned\x07\x1b[31m\u202etxt.exe :boom: [red]x[/red]\rno\x9b2J\u200b\U000e0041\ud800\tend\nnext"
SHOWN = r"\x1b]0;pwned\x07\x1b[31m\u202etxt.exe :boom: [red]x[/red]\rno\x9b2J\u200b\U000e0041\ud800\tend\nnext"


def unseen(text: str) -> set[str]:
    """Return the characters that a terminal would obey or hide, by their Unicode categories."""
    return {c for c in text if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and c != "\n"}


@pytest.mark.promise("security:author-of-data")
def test_a_table_and_a_message_show_every_character(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(HOSTILE, [HOSTILE], [[HOSTILE], ["Straße 猫 👩‍👩‍👧"]])
    output.print_table(HOSTILE, ["key"], [])
    output.say(f"first\nquoted: {HOSTILE}")
    shown, said = capsys.readouterr()
    assert unseen(shown) == {"\u200d"}  # it joins the emoji of the family
    assert shown.count(SHOWN) == 4
    assert "Straße 猫 👩‍👩‍👧" in shown
    assert unseen(said) == set()
    assert said == f"first\nquoted: {SHOWN}\n".replace(r"\nnext", "\nnext")


def test_json_means_the_same_and_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"key": HOSTILE, HOSTILE: 1}, {"key": "Straße 猫", HOSTILE: None}]
    for write in (output.print_json, output.print_json_rows):
        write(rows)
        shown = capsys.readouterr().out
        assert json.loads(shown) == rows
        assert unseen(shown) == set()
        assert "Straße 猫" in shown


def test_json_has_no_number_that_is_none() -> None:
    shown = output.json_text([{"share": float("nan"), "times": (1.5, float("-inf"), datetime(2026, 1, 1))}])
    assert json.loads(shown, parse_constant=pytest.fail) == [{"share": "nan", "times": [1.5, "-inf", "2026-01-01T00:00:00"]}]


def test_a_path_with_spaces_or_a_dash_can_be_pasted() -> None:
    assert [output.to_paste(Path(path)) for path in ("my shop", "-v.dump", "/a")] == ["'my shop'", "./-v.dump", "/a"]


def test_a_log_and_a_crash_show_every_character(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("jobs", logging.ERROR, "file", 1, "quoted: %s", (HOSTILE,), None)
    logged = output.VisibleFormatter("%(message)s").format(record)
    assert logged == f"quoted: {SHOWN}"
    error = LookupError(HOSTILE)
    output.show_crash(type(error), error, None)
    shown = capsys.readouterr().err
    assert unseen(shown) == set()
    assert "LookupError: " + SHOWN.replace(r"\nnext", "\nnext") in shown


@pytest.mark.parametrize(("claimed", "expected"), [("boss", " (says boss)"), ("", ""), ("b\udcff", " (says b\\udcff)")])
def test_the_ledger_names_the_account(claimed: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("USER", "SUDO_USER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOGNAME", claimed)
    try:
        account = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        account = str(os.getuid())
    assert operator("skip") == f"{account}{expected}, tidegate skip"
