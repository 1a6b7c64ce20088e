"""Every error gives one line with the problem and its remedy, the family's exit code, and nothing half done."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine
from tests.servers import Server
from tidegate.explain import error_pages

USAGE, PERMANENT, TRY_AGAIN, INTERRUPTED = 2, 1, 75, 130
VERBS = {
    "trigger": ("trigger", "{}"),
    "run": ("run", "{}"),
    "backfill": ("backfill", "{}", "--from-txid", "1", "--to-txid", "2"),
    "inspect": ("inspect", "{}"),
    "get": ("get", "{}", "daily", "UA", "2013-01-01"),
    "retry": ("retry", "{}"),
    "skip": ("skip", "{}", "1", "--reason", "no use", "--yes"),
    "redo": ("redo", "{}", "1", "--reason", "it was wrong", "--yes"),
    "pause": ("pause", "{}", "--reason", "a move"),
    "resume": ("resume", "{}"),
    "quarantine list": ("quarantine", "list", "{}"),
    "quarantine replay": ("quarantine", "replay", "{}", "--reason", "fixed"),
    "retire": ("retire", "{}", "--reason", "not needed", "--yes"),
    "reinstate": ("reinstate", "{}"),
    "rebuild": ("rebuild", "{}", "--yes"),
}

# These look at the declaration alone, at first.
OF_DECLARATIONS = {"explain": ("explain", "{}"), "prune": ("prune", "{}", "daily", "--keep", "0")}


def _fails(done, exit_code: int, *fragments: str) -> None:
    assert done.returncode == exit_code, done.stderr
    *progress, error, more = done.stderr.splitlines()
    assert all(line.startswith("flights: ") for line in progress)
    assert error_pages.has_page(more.removeprefix("More: tidegate error "))
    assert error.startswith("tidegate: ")
    assert done.stdout == ""
    for fragment in fragments:
        assert fragment in error


def test_an_unknown_pipeline_is_named_with_the_nearest_one(tidegate: CommandLine) -> None:
    for verb in (VERBS | OF_DECLARATIONS).values():
        arguments = [argument.format("flight") for argument in verb]
        _fails(tidegate(*arguments), USAGE, "no pipeline flight.", "Did you mean flights?", "flights, word_count")


MISTYPED = {
    ("look",): "No such command 'look'",
    ("trigger",): "Missing argument 'PIPELINE'",
    ("run", "flights", "--from-txid", "0"): "0 is not in the range x>=1",
    ("status", "--jason"): "Did you mean '--json'?",
    ("why", "flights", "0"): "0 is not in the range",
    ("query", "words_total", "the", "--no-such-option"): "No such option",
}
REFUSED = {
    ("why", "flight"): "Did you mean flights?",
    ("why", "flights", "7"): "flights has no txid 7.",
    ("why", "<b>\x1b[31m"): "There is no pipeline <b>\\x1b[31m.",
    ("error", "SOURCE_CHANGE"): "Did you mean SOURCE_CHANGED?",
    ("error", "../poison"): "There is no error ../poison.",
    ("error", "README"): "There is no error README.",
    ("query", "words_totl", "the"): "There is no query words_totl. Did you mean words_total? Queries: words_total.",
    ("query", "words_total", "the"): "Pipeline word_count is not registered. If it is new, run: tidegate migrate",
    ("inspect", "flights", "--since", "yesterday"): "'yesterday' is no time. Write a duration until now, such as 90m, 2h or 3d",
    ("inspect", "flights", "--since", "2999-01-01"): "lies in the future",
    ("inspect", "flights", "--from-txid", "3", "--to-txid", "2"): "--from-txid 3 is larger than --to-txid 2",
    ("inspect", "flights", "--error", "SOURCE_CHANGE"): "Did you mean SOURCE_CHANGED?",
    ("inspect", "flights", "--txid", "1", "--phase", "failed"): "--phase chooses among batches: leave out --txid",
}


def test_a_request_that_makes_no_sense_is_refused_with_the_right_one(tidegate: CommandLine) -> None:
    for arguments, message in (MISTYPED | REFUSED).items():
        refusal = tidegate.refused(*arguments)
        assert message in " ".join(refusal.split())
        assert arguments in REFUSED or "--help' for help." in refusal


def test_an_interrupted_verb_says_that_nothing_is_lost(tidegate: CommandLine) -> None:
    mended = tidegate.settings.home / "mended"
    os.mkfifo(mended)
    mend = ("quarantine", "mend", "flights", "1", "1", "--reason", "a slip")
    started = tidegate.start(*mend, "--payload-from", str(mended))
    with mended.open("w"):  # opens when the command reads it; the command then waits for its end
        started.send_signal(signal.SIGINT)
        _, message = started.communicate(timeout=60)
    assert started.returncode == INTERRUPTED
    assert message.strip() == "tidegate: interrupted; what was committed stays, the rest is picked up by the next run."


def test_a_range_that_cannot_be_is_refused(tidegate: CommandLine) -> None:
    for verb in ("trigger", "run", "backfill"):
        done = tidegate(verb, "flights", "--from-txid", "3", "--to-txid", "2")
        _fails(done, USAGE, "upside down", "from_txid 3", "to_txid 2")
        done = tidegate(verb, "flights", "--from-txid", "7", "--to-txid", "9")
        _fails(done, USAGE, "txids 1 to 6 would be left out", "Start at 1")


@pytest.mark.promise("error:STORE_UNAVAILABLE")
def test_without_a_ledger_every_verb_says_what_is_missing(tidegate: CommandLine, server: Server, tmp_path: Path) -> None:
    """An address where nothing answers may answer later; a wrong password, which is not shown, and missing tables stay so."""
    passfile = tmp_path / "pgpass"
    passfile.write_text("*:*:*:*:not-the-password\n")
    passfile.chmod(0o600)
    empty = server.create_database()
    elsewhere = replace(tidegate, settings=replace(tidegate.settings, pg_database=empty))
    try:
        for verb in VERBS.values():
            arguments = [argument.format("flights") for argument in verb]
            _fails(tidegate(*arguments, PGPORT="1"), TRY_AGAIN, "127.0.0.1", "port 1", "tidegate up")
            refused = tidegate(*arguments, PGPASSFILE=str(passfile))
            _fails(refused, PERMANENT, "tidegate", "password")
            assert "not-the-password" not in refused.stderr
            _fails(elsewhere(*arguments), PERMANENT, "tidegate migrate")
    finally:
        server.drop_database(empty)


WRONG = [
    (["inspect", "flights", "--state", "dayly"], ["no state dayly", "daily"]),
    (["inspect", "flights", "--txid", "7"], ["txid 7"]),
    (["get", "flights", "daily", "UA", "the first"], ["the first", "date"]),
    (["run", "flights", "--from-txid", "2"], ["txid 1"]),
    (["backfill", "flights", "--from-txid", "1", "--to-txid", "2000000000"], ["opened no txid", "end at 1000"]),
]


@pytest.mark.promise("limit:MAX_BATCHES_PER_RUN")
def test_a_wrong_request_names_the_right_one(tidegate: CommandLine) -> None:
    for arguments, fragments in WRONG:
        _fails(tidegate(*arguments), USAGE, *fragments)
