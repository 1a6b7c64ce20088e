"""Bad records and failing batches, through Spark: set aside, replayed, tried again, given up; rows that Spark loses."""

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import pytest
import sqlalchemy as sa

from tests import steps
from tests.jobs.conftest import Tables, offenders
from tests.sources.conftest import Inbox, inbox
from tests.sources.in_process import counted_here
from tests.store import tables as ledger
from tidegate.jobs import Count, Files, FixedBatches, Pipeline, State, Sum
from tidegate.jobs.compute import batch_attempt
from tidegate.jobs.compute.stage import stage_partials
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import AttemptTimedOut, PipelinePaused, RowsLost

__all__ = ["counted_here", "inbox"]  # fixtures

SCHEMA = {"name": "string", "amount": "int"}
PER_NAME = {"per_name": State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")})}
CSV = Files("inbox", format="csv", schema=SCHEMA, glob="*.csv")
NOT_NEGATIVE = {"not negative": "amount >= 0"}


def declare(inbox: Inbox, source: Any = CSV, **pipeline: Any) -> Pipeline:
    return inbox.declare(source, **{"states": PER_NAME, "retry_delay_seconds": 0, **pipeline})


def by_line(inbox: Inbox) -> list[Mapping[str, Any]]:
    return sorted(steps.waiting(inbox.settings), key=lambda record: int(record["origin"].rpartition(" ")[2]))


PRICED = Files("inbox", format="csv", schema={**SCHEMA, "price": "decimal(10,2)"}, glob="*.csv")
BAD = {  # a record of CSV, and why it is set aside
    "b,two,1": "column amount: 'two' is no int",
    "c": "it has 1 value(s), the 3 columns need one each",
    '"b ""x"", y",2,3,4': "it has 4 value(s), the 3 columns need one each",
    '"a, b",1,1.005': "column price: '1.005' is no decimal(10,2) (nothing is rounded)",
    "d,-2,1": "fails the check 'not negative'",
    "e,,1": "fails the check 'not negative'",  # NULL does not fulfil it
    ",1,1": "key column name is NULL",
    f"{'x' * 2001},1,1": "column name takes 2001 bytes, the limit is 2000",
}


def test_bad_records_are_set_aside_and_replayed_under_the_rules_of_the_day(
    tables: Tables, store: StateStore, as_owner: Callable[..., Any]
) -> None:
    """With reason, line and the record as it stood; those that are good now count once, others wait again."""
    good = ["a,1,1.25", f"{'x' * 2000},5,1"]
    tables.write("1.csv", "".join(f"{line}\n" for line in ["name,amount,price", *good, *BAD]))
    strict = declare(tables, PRICED, on_poison="quarantine", check=NOT_NEGATIVE)
    assert tables.run(strict) == [1]
    assert tables.counts(strict) == {"a": (1, 1), "x" * 2000: (1, 5)}
    records = by_line(tables)
    assert [(r["txid"], r["origin"], r["reason"]) for r in records] == [
        (1, f"1.csv, line {line}", reason) for line, reason in enumerate(BAD.values(), start=4)
    ]
    raw = [record["payload"] for record in records if record["is_raw"]]
    assert raw == list(BAD)[:4]
    assert [json.loads(record["payload"])["name"] for record in records[4:]] == ["d", "e", None, "x" * 2001]
    (attempt,) = steps.history(tables.settings, 1).attempts
    assert (attempt["source_rows"], attempt["quarantined_rows"], attempt["transformed_rows"]) == (10, 8, 2)

    assert store.replay_quarantined(strict.spec, "test", "fixed") == (2, 8)
    assert store.replay_quarantined(strict.spec, "test", "fixed") is None
    tables.write("2.csv", "name,amount,price\na,10,1\n")
    milder = declare(tables, PRICED, on_poison="quarantine", check={"not far below": "amount >= -2"}, version=2)
    assert tables.run(milder, "second") == [2, 3]
    assert tables.counts(milder) == {"a": (2, 11), "d": (1, -2), "x" * 2000: (1, 5)}
    assert [(r["txid"], r["payload"], r["origin"]) for r in by_line(tables) if r["is_raw"]] == [
        (2, payload, r["origin"]) for payload, r in zip(raw, records, strict=False)
    ]
    assert len(steps.waiting(tables.settings)) == 7

    assert store.replay_quarantined(milder.spec, "test", "fixed") == (4, 7)
    as_owner(sa.delete(ledger.quarantine).where(ledger.quarantine.c.payload.contains("two")))
    assert re.search("SourceChanged: .*7 records were taken out of quarantine .* 6 are there", tables.outcome(milder, 4))


@pytest.mark.promise("limit:Pipeline.tries", "error:BATCH_RETRIED")
def test_a_batch_that_keeps_failing_is_given_up_after_its_tries(inbox: Inbox) -> None:
    for number in (1, 3):
        inbox.write(f"{number}.csv", f"name,amount\na,{number}\n")
    inbox.write("2.csv", "name,amount\nb,two\n")
    failures = iter([RowsLost("first try")])

    def flaky(rows: Any) -> Any:
        if error := next(failures, None):
            raise error
        return rows

    pipeline = declare(inbox, on_poison="skip", tries=3, transform=flaky, concurrency=1)
    result = run_pipeline(inbox.settings, pipeline, run_id="run")

    assert [commit.skipped_reason is None for commit in result.commits] == [True, False, True]
    assert inbox.counts(pipeline) == {"a": (2, 4)}
    assert len(steps.history(inbox.settings, 1).attempts) == 2
    history = steps.history(inbox.settings, 2)
    assert [attempt["error"].partition(":")[0] for attempt in history.attempts] == ["MALFORMED_RECORD"] * 3
    assert history.commit is not None
    assert "it failed in try 3 of 3, with MALFORMED_RECORD" in history.commit["skipped_reason"]
    assert history.status.phase == "skipped"


def losing(condition: str, times: int) -> Callable[[Any], Any]:
    """Return a function that keeps some rows alone, and these so many times."""
    return lambda rows: rows.where(condition).selectExpr(f"explode(array_repeat(1, {times})) twice", "*").drop("twice")


SUMS = "of 4 rows 4 arrived .*the sums of their hashes differ by 0x[1-9a-f]"
SAME = lambda rows: rows  # noqa: E731
# Which function gets other rows than it should, as which argument; route and transform; how often they come; what is noticed.
LOST: dict[str, tuple[Any, str, int, str, Any, int, str]] = {
    "a partial, in process": (stage_partials, "stage_in_process", 3, "chosen", None, 1, "of 4 rows 2 arrived"),
    "a partial, on executors": (stage_partials, "stage_on_executors", 3, "on executors", None, 1, "of 4 rows 2 arrived"),
    "a partial for another": (stage_partials, "stage_in_process", 3, "chosen", None, 2, SUMS),
    "pairs of rows": (batch_attempt, "aggregate", 0, "safe", None, 2, SUMS),
    "pairs of transformed rows": (batch_attempt, "aggregate", 0, "chosen", SAME, 2, SUMS),
}


@pytest.mark.promise(
    "decision:0011",
    "error:ROWS_LOST",
    "performance:of-untouched-files-in-one-task-partials",
    "performance:with-several-states-rows-are-observed-on",
)
def test_rows_and_partials_that_are_lost_or_replaced_are_noticed(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the source until COPY has written them. If a, a, a, a arrive for a, a, b, b, number and XOR of the ids agree."""
    tables.write("1.csv", "name,amount\na,1\na,1\nb,1\nb,1\n")
    varying = lambda rows: rows.where("double(java_method('java.lang.Math', 'random')) < 0.5")  # noqa: E731
    tables.write("2.csv", "name,amount\n" + "".join(f"n{number},{number}\n" for number in range(200)))
    two = {**PER_NAME, "total": State(aggregates={"lines": Count()})}
    tables.plan(declare(tables, states=two), "run")
    found, expected = {}, {}
    for name, (place, function, at, route, transform, times, message) in LOST.items():
        lose, real = losing("name = 'a'", times), getattr(place, function)

        def corrupted(*arguments: Any, real: Any = real, at: int = at, lose: Any = lose, **named: Any) -> Any:
            return real(*arguments[:at], lose(arguments[at]), *arguments[at + 1 :], **named)

        with monkeypatch.context() as patched:
            patched.setattr(place, function, corrupted)
            found[name] = tables.outcome(declare(tables, transform=transform), routing=steps.ROUTINGS[route])
        expected[name] = f"RowsLost: .*{message}"
    found["varying"] = tables.outcome(declare(tables, transform=varying, states=two), 2)
    assert offenders(found, {**expected, "varying": "RowsLost: .*the sums of their hashes differ by 0x[1-9a-f]"}) == {}
    assert [steps.history(tables.settings, txid).seals for txid in (1, 2)] == [[], []]


STUBBORN = """
import signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
"""


@pytest.mark.promise("error:ATTEMPT_TIMED_OUT", "decision:0014")
def test_an_attempt_that_takes_too_long_gives_its_core_back_and_leaves_no_rows_out(inbox: Inbox) -> None:
    """Whatever its Python code does: its worker ends, and with it Spark's task."""
    pid_file = inbox.settings.home / "pid"

    def transform(rows: Any) -> Any:
        def stay(batches: Any) -> Any:
            for batch in batches:
                pid_file.write_text(str(os.getpid()))
                exec(STUBBORN)
                yield batch

        return rows.mapInPandas(stay, rows.schema)

    inbox.write("1.csv", "name,amount\na,1\n")
    pipeline = declare(inbox, transform=transform, message_timeout_seconds=6, on_poison="skip", tries=1)
    inbox.plan(pipeline, "run")
    with pytest.raises(AttemptTimedOut, match="message timeout of 6 s"):
        steps.process(inbox.settings, pipeline, 1, owner="test")
    with StateStore.connect(inbox.settings) as store:
        history = store.batch_history("inbox", 1)
        assert (history.status.phase, history.attempts[-1]["is_poison"]) == ("failed", False)
        assert not store.turn("inbox", 1).given_up
    worker = int(pid_file.read_text())
    assert wait_until(lambda: not psutil.pid_exists(worker), 30)


@pytest.mark.usefixtures("counted_here")
def test_the_source_is_called_after_commits_and_failures(settings: Settings, register: Callable[..., None]) -> None:
    """Ack after a commit, fail with the error after a failed attempt. Errors in them change nothing."""
    calls: list[tuple[Any, ...]] = []
    acked: list[int] = []
    failing = {1, 2}
    failures = iter([RowsLost("not yet")])

    class Dying(BaseException):
        pass

    class Listening(FixedBatches):
        def ack(self, attempt: Any, settings: Settings) -> None:  # noqa: ARG002
            calls.append(("ack", attempt.txid, attempt.source_metadata["position"]))
            if attempt.txid in failing:
                raise Dying if attempt.txid == 2 else OSError("no listener")
            acked.append(attempt.txid)

        def fail(self, attempt: Any, error: Exception, settings: Settings) -> None:  # noqa: ARG002
            calls.append(("fail", attempt.txid, attempt.number, type(error).__name__))
            raise OSError("no listener")

    def fails_once(rows: Any) -> Any:
        if error := next(failures, None):
            raise error
        return rows

    fails_once.in_process = lambda inputs: fails_once(inputs[""])  # type: ignore[attr-defined]
    source = Listening([[("a", 1)], [("a", 2)]], SCHEMA)
    pipeline = Pipeline("inbox", source, PER_NAME, transform=fails_once, window=1, retry_delay_seconds=0)
    register(pipeline)
    with pytest.raises(Dying):
        run_pipeline(settings, pipeline, run_id="first")
    assert calls[0] == ("fail", 1, 1, "RowsLost")
    assert set(calls[1:]) == {("ack", 1, 0), ("ack", 2, 1)}
    with StateStore.connect(settings) as store:
        assert store.committed("inbox") == 2
        assert [commit.txid for commit in store.awaiting_acks("inbox", 10)] == [1, 2]

        failing.remove(2)
        store.pause("inbox", "me", "the listener moves")
        with pytest.raises(PipelinePaused):
            run_pipeline(settings, pipeline, run_id="paused")
        assert acked == []
        store.resume("inbox", "me", "it has moved")
        assert run_pipeline(settings, pipeline, run_id="second").txids == []

        assert acked == [2]
        assert [commit.txid for commit in store.awaiting_acks("inbox", 10)] == [1]
        failing.remove(1)
        for run_id in ("third", "fourth"):
            run_pipeline(settings, pipeline, run_id=run_id)
        assert acked == [2, 1]
        assert store.awaiting_acks("inbox", 10) == []
