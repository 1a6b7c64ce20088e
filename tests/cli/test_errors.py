"""Every error gives one line with the problem and its remedy, the family's exit code, and nothing half done."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine
from tests.servers import Server
from tidegate.explain import error_pages

USAGE, PERMANENT, TRY_AGAIN = 2, 1, 75
VERBS = (
    *("trigger flights", "run flights", "inspect flights", "retry flights", "resume flights", "reinstate flights"),
    *("backfill flights --from-txid 1 --to-txid 2", "get flights daily UA 2013-01-01", "quarantine list flights"),
    *("skip flights 1 --reason useless --yes", "redo flights 1 --reason wrong --yes", "pause flights --reason moved"),
    *("quarantine replay flights --reason fixed", "retire flights --reason useless --yes", "rebuild flights --yes"),
)


def _fails(done, exit_code: int, *fragments: str) -> None:
    assert done.returncode == exit_code, done.stderr
    *progress, error, more = done.stderr.splitlines()
    assert all(line.startswith("flights: ") for line in progress)
    assert error_pages.has_page(more.removeprefix("More: tidegate error "))
    assert error.startswith("tidegate: ")
    assert done.stdout == ""
    for fragment in fragments:
        assert fragment in error


@pytest.mark.promise("error:STORE_UNAVAILABLE")
def test_without_a_ledger_every_verb_says_what_is_missing(tidegate: CommandLine, server: Server, tmp_path: Path) -> None:
    passfile = tmp_path / "pgpass"
    passfile.write_text("*:*:*:*:not-the-password\n")
    passfile.chmod(0o600)
    empty = server.create_database()
    elsewhere = replace(tidegate, settings=replace(tidegate.settings, pg_database=empty))
    try:
        for arguments in map(str.split, VERBS):
            _fails(tidegate(*arguments, PGPORT="1"), TRY_AGAIN, "127.0.0.1", "port 1", "tidegate up")
            refused = tidegate(*arguments, PGPASSFILE=str(passfile))
            _fails(refused, PERMANENT, "tidegate", "password")
            assert "not-the-password" not in refused.stderr
            _fails(elsewhere(*arguments), PERMANENT, "tidegate migrate")
    finally:
        server.drop_database(empty)


WRONG = {
    ("inspect", "flights", "--state", "dayly"): ["no state dayly", "daily"],
    ("inspect", "flights", "--txid", "7"): ["txid 7"],
    ("get", "flights", "daily", "UA", "the first"): ["the first", "date"],
    ("run", "flights", "--from-txid", "2"): ["txid 1"],
    ("backfill", "flights", "--from-txid", "1", "--to-txid", "2000000000"): ["opened no txid", "end at 1000"],
}


@pytest.mark.promise("limit:MAX_BATCHES_PER_RUN")
def test_a_wrong_request_names_the_right_one(tidegate: CommandLine) -> None:
    for arguments, fragments in WRONG.items():
        _fails(tidegate(*arguments), USAGE, *fragments)
