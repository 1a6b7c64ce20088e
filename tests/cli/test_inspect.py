"""`inspect` with conditions: by phase, error, time and txid, for people and programs."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from tests.cli.conftest import CommandLine
from tests.store import Attempt, Tracked, encode_metadata
from tidegate.jobs.pipelines import flights
from tidegate.state_store import StateStore

USAGE = 2
SPEC = flights.PIPELINE.spec


@pytest.fixture
def ledger(tidegate: CommandLine, store: StateStore) -> CommandLine:
    """Flights with txids 1-2 committed, 3 failed, 4 halted, 5-6 planned."""
    assert store.open_batches(SPEC, "run", [], None, [encode_metadata({"files": [], "n": n}) for n in range(6)])
    for txid in (1, 2, 3, 4):
        attempt = store.start_attempt(SPEC, txid, "test")
        assert isinstance(attempt, Attempt)
        if txid <= 2:
            store.seal(attempt, [], Tracked(0))
            store.commit_batch(SPEC, txid, "test")
        else:
            store.fail_attempt(attempt, "SPARK_FAILED: it broke: \x1b[31mred")
    store.halt_batch("flights", 4, "SOURCE_CHANGED: a.csv is gone")
    return tidegate


CHOSEN = {
    (): [1, 2, 3, 4, 5, 6],
    ("--phase", "failed"): [3],
    ("--phase", "committed"): [1, 2],
    ("--phase", "skipped"): [],
    ("--error", "SOURCE_CHANGED"): [4],
    ("--error", "spark_failed"): [3],
    ("--since", "2h"): [1, 2, 3, 4, 5, 6],
    ("--since", "1w", "--until", "1 h"): [],
    ("--from-txid", "2", "--to-txid", "4"): [2, 3, 4],
    ("--from-txid", "2", "--phase", "committed", "--since", "3d"): [2],
    ("--limit", "2"): [5, 6],
    ("--phase", "committed", "--limit", "1"): [2],
}


@pytest.mark.promise("verb:inspect", "json:inspect")
def test_conditions_choose_batches(ledger: CommandLine) -> None:
    """All that are given have to hold; the newest are last, as in the whole ledger."""
    chosen = {given: [batch["txid"] for batch in ledger.json("inspect", "flights", *given)] for given in CHOSEN}
    assert chosen == CHOSEN


def test_a_table_has_the_error_as_a_short_column(ledger: CommandLine) -> None:
    """Only if a batch has one."""
    shown = ledger("inspect", "flights").stdout
    assert re.search(r"committed_at +error +waits_for$", shown, re.MULTILINE)
    assert re.search(r"^ *4 +halted .* SOURCE_CHANGED +SOURCE_CHANGED: a\.csv is gone$", shown, re.MULTILINE)
    assert "\x1b" not in shown
    assert " error " not in ledger("inspect", "flights", "--phase", "committed").stdout
    assert "No batch of flights fulfils all conditions." in ledger("inspect", "flights", "--phase", "skipped").stderr
    few = ledger("inspect", "flights", "--phase", "committed", "--limit", "1")
    assert "There may be earlier ones" in few.stderr


def test_times_are_utc_unless_they_name_a_zone(ledger: CommandLine) -> None:
    """An hour from now in Samoa is still to come; the same clock in UTC is past."""
    now = datetime.now(UTC)
    long_ago = (now - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M")
    assert len(ledger.json("inspect", "flights", "--since", long_ago)) == 6
    assert len(ledger.json("inspect", "flights", "--since", f"{long_ago}+05:00")) == 6
    assert len(ledger.json("inspect", "flights", "--since", now.date().isoformat())) == 6
    refused = ledger("inspect", "flights", "--since", f"{long_ago}-11:00")
    assert (refused.returncode, "lies in the future" in refused.stderr) == (USAGE, True)


WRONG = [
    (("--since", "yesterday"), "'yesterday' is no time. Write a duration until now, such as 90m, 2h or 3d"),
    (("--since", "999999w"), "'999999w' is no time"),
    (("--until", "10000-01-01"), "is no time"),
    (("--since", "2999-01-01"), "lies in the future"),
    (("--since", "1h", "--until", "2h"), "is later than --until"),
    (("--from-txid", "3", "--to-txid", "2"), "--from-txid 3 is larger than --to-txid 2"),
    (("--phase", "running"), "'running' is not one of"),
    (("--error", "SOURCE_CHANGE"), "Did you mean SOURCE_CHANGED?"),
    (("--txid", "1", "--phase", "failed"), "--phase chooses among batches: leave out --txid"),
    (("--state", "daily", "--since", "2h"), "--since chooses among batches"),
    (("--source", "--to-txid", "2"), "--to-txid chooses among batches"),
]


def test_conditions_that_make_no_sense_are_refused(tidegate: CommandLine) -> None:
    """With the way they are written, before anything is read."""
    for arguments, message in WRONG:
        done = tidegate("inspect", "flights", *arguments)
        assert (done.returncode, message in " ".join(done.stderr.split())) == (USAGE, True), (arguments, done.stderr)
