"""Keys that `tidegate get --keys-from` reads from a CSV file."""

import io
import sys
from pathlib import Path

import pytest

from tidegate.commands.show.inspect_verbs import _keys_of_file
from tidegate.state_store.base.errors import UsageError


def test_every_text_can_be_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The empty text, and texts with line ends of any kind, quotes, or characters that only Python takes for line ends."""
    keys = ["", "a", "two\nlines", "two\r\nlines", "\r", "\u2028\x0b\x85", 'say "hi", b', " "]
    content = "".join('"' + key.replace('"', '""') + '"\r\n' for key in keys).encode()
    file = tmp_path / "keys.csv"
    file.write_bytes(content)
    assert list(_keys_of_file(str(file), 1)) == [(key,) for key in keys]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'\xef\xbb\xbfa,b\n\n"",c')))
    assert list(_keys_of_file("-", 2)) == [("a", "b"), ("", "c")]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"a\nb,c\n", UsageError, "line 2: 2 value"),
        (b'"a"b\n', UsageError, "line 1: this is no CSV"),
    ],
)
def test_a_file_that_is_not_a_list_of_keys_is_refused_with_its_line(
    tmp_path: Path, content: bytes, error: type[Exception], message: str
) -> None:
    """Nothing is guessed."""
    file = tmp_path / "keys.csv"
    file.write_bytes(content)
    with pytest.raises(error, match=message):
        list(_keys_of_file(str(file), 1))
