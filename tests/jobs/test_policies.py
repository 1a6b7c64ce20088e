"""Bad records and failing batches, through Spark: set aside, replayed, tried again, given up; rows that Spark loses."""

import json
import os
import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import psutil
import pytest
import sqlalchemy as sa
from pyspark.sql import functions as F

from tests import steps
from tests.jobs.conftest import Tables, offenders
from tests.sources.conftest import PER_NAME
from tidegate.jobs import Count, Files, FixedBatches, Pipeline, Rows, State
from tidegate.jobs.compute import batch_attempt
from tidegate.jobs.compute.stage import stage_partials
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.stack.components.server_process import wait_until
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import AttemptTimedOut, DeclarationInvalid, PipelinePaused, RowsLost

SCHEMA = {"name": "string", "amount": "int"}
CSV = Files("inbox", format="csv", schema=SCHEMA, glob="*.csv")
NOT_NEGATIVE = {"not negative": "amount >= 0"}


def declare(tables: Tables, source: Any = CSV, **pipeline: Any) -> Pipeline:
    return tables.declare(source, retry_delay_seconds=0, **pipeline)


def failing_once() -> Any:
    failures = iter([RowsLost("not yet")])

    def transform(rows: Any) -> Any:
        if error := next(failures, None):
            raise error
        return rows

    transform.in_process = lambda inputs: transform(inputs[""])  # type: ignore[attr-defined]
    return transform


def by_line(tables: Tables) -> list[Mapping[str, Any]]:
    return sorted(steps.waiting(tables.settings), key=lambda record: int(record["origin"].rpartition(" ")[2]))


PRICED = replace(CSV, schema={**SCHEMA, "price": "decimal(10,2)"})
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


def test_bad_records_are_set_aside_and_replayed(tables: Tables, store: StateStore, as_owner: Callable[..., Any]) -> None:
    """With reason, line and the record as it stood; those that are good now count once, others wait again."""
    good = ["a,1,1.25", f"{'x' * 2000},5,1"]
    tables.write("1.csv", "".join(f"{line}\n" for line in ["name,amount,price", *good, *BAD]))
    strict = declare(tables, PRICED, on_poison="quarantine", check=NOT_NEGATIVE)
    assert tables.run(strict) == [1]
    assert tables.counts(strict) == {"a": (1, 1), "x" * 2000: (1, 5)}
    records = by_line(tables)
    expected = [(1, f"1.csv, line {line}", reason) for line, reason in enumerate(BAD.values(), start=4)]
    assert [(r["txid"], r["origin"], r["reason"]) for r in records] == expected
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
    again = [(2, payload, r["origin"]) for payload, r in zip(raw, records, strict=False)]
    assert [(r["txid"], r["payload"], r["origin"]) for r in by_line(tables) if r["is_raw"]] == again
    assert len(steps.waiting(tables.settings)) == 7
    assert store.replay_quarantined(milder.spec, "test", "fixed") == (4, 7)
    as_owner(sa.text("DELETE FROM tidegate.quarantine WHERE payload LIKE '%two%'"))
    assert re.search("SourceChanged: .*7 records were taken out of quarantine .* 6 are there", tables.outcome(milder, 4))


EXACTLY: dict[str, tuple[str, str]] = {  # a value of each type as a file has it, and as Spark shows it
    "timestamp": ("2024-01-05T10:00:00.123456Z", "2024-01-05 10:00:00.123456"),
    "timestamp_ntz": ("0001-01-01T00:00:00.000001", "0001-01-01 00:00:00.000001"),
    "date": ("0001-01-01", "0001-01-01"),
    "decimal(38,18)": ("12345678901234567890.123456789012345678", "12345678901234567890.123456789012345678"),
    "bigint": ("-9223372036854775808", "-9223372036854775808"),
    "smallint": ("-32768", "-32768"),
    "boolean": ("true", "true"),
    "double": ("5e-324", "4.9E-324"),
    "float": ("16777216.0", "1.6777216E7"),
    "double NaN": ("NaN", "NaN"),
    "float -Infinity": ("-Infinity", "-Infinity"),
    "binary": ("\u00e9", "\u00e9"),
    "string": ("1.10 \u00e9\u2028", "1.10 \u00e9\u2028"),
}


def test_a_record_that_waited_has_lost_nothing(tables: Tables, store: StateStore) -> None:
    """Six digits of a second, all digits of a number, whether a column was mended or not: as in a clean run."""
    columns = {f"v{number}": kind.partition(" ")[0] for number, kind in enumerate(EXACTLY)}
    usual = {"states": {"log": Rows({"amount": "integer", **dict.fromkeys(columns, "text")})}, "on_poison": "quarantine"}

    def over(schema: dict[str, str], first: str = "v0", **more: Any) -> Pipeline:
        casts = [f"CAST({first if name == 'v0' else name} AS string) {name}" for name in columns]
        texts = lambda rows: rows.selectExpr("amount", *casts)  # noqa: E731
        return declare(tables, replace(CSV, schema={"amount": "int", **schema}), transform=texts, **usual, **more)

    def replay(pipeline: Pipeline) -> None:
        txid, _ = store.replay_quarantined(pipeline.spec, "test", "mended") or (0, 0)
        assert tables.run(pipeline, f"replay {txid}") == [txid]

    values = ",".join(text for text, _ in EXACTLY.values())
    lines = [",".join(["shop", *columns, "amount"]), *(f"s,{values},{amount}" for amount in ("1", "-1", "-2", "-5", "3x"))]
    tables.write("1.csv", "".join(f"{line}\n" for line in lines))
    tables.run(over({**columns, "shop": "string"}, check=NOT_NEGATIVE))
    (_, two, _, raw) = by_line(tables)
    steps.mend(tables.settings, two, two["payload"].replace('"amount":-2', '"amount":2'))
    steps.mend(tables.settings, raw, f"s,{values},3")
    replay(milder := over(columns, version=2, check={"not far below": "amount >= -1"}))
    shown = {f"v{number}": shown for number, (_, shown) in enumerate(EXACTLY.values())}
    found = [{name: value for name, value in row.items() if name != "position"} for row in tables.rows(milder, "log")]
    assert sorted(found, key=lambda row: row["amount"]) == [{"amount": n, **shown} for n in (-1, 1, 2, 3)]
    replay(over({"w0": columns["v0"], **{name: columns[name] for name in [*columns][1:]}}, "w0", version=3))
    (left,) = steps.waiting(tables.settings)
    assert left["reason"] == "it has no column w0, but v0, which the schema does not name"


@pytest.mark.usefixtures("counted_here")
@pytest.mark.promise("limit:Pipeline.tries", "error:BATCH_RETRIED")
def test_a_batch_that_keeps_failing_is_given_up_after_its_tries(tables: Tables) -> None:
    for number, line in enumerate(("a,1", "b,two", "a,3"), start=1):
        tables.write(f"{number}.csv", f"name,amount\n{line}\n")
    pipeline = declare(tables, on_poison="skip", tries=3, transform=failing_once(), concurrency=1)
    result = run_pipeline(tables.settings, pipeline, run_id="run")
    assert [commit.skipped_reason is None for commit in result.commits] == [True, False, True]
    assert tables.counts(pipeline) == {"a": (2, 4)}
    assert len(steps.history(tables.settings, 1).attempts) == 2
    history = steps.history(tables.settings, 2)
    assert [attempt["error"].partition(":")[0] for attempt in history.attempts] == ["MALFORMED_RECORD"] * 3
    assert "it failed in try 3 of 3, with MALFORMED_RECORD" in history.commit["skipped_reason"]  # type: ignore[index]
    assert history.status.phase == "skipped"


def test_an_error_that_ends_a_run_is_not_kept_back_by_pauses_of_later_batches(tables: Tables) -> None:
    tables.write("1.csv", "name,amount\na,1\n")
    tables.write("2.csv", "name,amount\nb,2\n")
    has_failed = threading.Event()

    def transform(rows: Any) -> Any:
        if rows.first()["name"] == "b":
            has_failed.set()
            raise OSError("away")
        assert has_failed.wait(60)
        raise ValueError("wrong")

    pipeline = tables.declare(CSV, transform=transform, tries=2, retry_delay_seconds=120)
    with pytest.raises(DeclarationInvalid, match="wrong"):
        run_pipeline(tables.settings, pipeline, run_id="run")
    assert len(steps.history(tables.settings, 2).attempts) == 1


SUMS = "of 4 rows 4 arrived .*the sums of their hashes differ by 0x[1-9a-f]"
# Which function gets other rows than it should, as which argument; route and transform; how often they come; what is noticed.
LOST: dict[str, tuple[Any, str, int, str, Any, int, str]] = {
    "a partial, in process": (stage_partials, "stage_in_process", 3, "chosen", None, 1, "of 4 rows 2 arrived"),
    "a partial, on executors": (stage_partials, "stage_on_executors", 3, "on executors", None, 1, "of 4 rows 2 arrived"),
    "a partial for another": (stage_partials, "stage_in_process", 3, "chosen", None, 2, SUMS),
    "pairs of rows": (batch_attempt, "aggregate", 0, "safe", None, 2, SUMS),
    "pairs of transformed rows": (batch_attempt, "aggregate", 0, "chosen", lambda rows: rows, 2, SUMS),
}


@pytest.mark.promise("decision:0011", "error:ROWS_LOST", "performance:of-untouched-files-in-one-task-partials")
@pytest.mark.promise("performance:with-several-states-rows-are-observed-on")
def test_rows_and_partials_that_are_lost_or_replaced_are_noticed(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the source until COPY has written them. If a, a, a, a arrive for a, a, b, b, number and XOR of the ids agree."""
    tables.write("1.csv", "name,amount\na,1\na,1\nb,1\nb,1\n")
    varying = lambda rows: rows.where(F.udf(lambda _: random.random(), "double")("name") < 0.5)  # noqa: E731
    tables.write("2.csv", "name,amount\n" + "".join(f"n{number},{number}\n" for number in range(200)))
    two = {"per_name": PER_NAME, "total": State(aggregates={"lines": Count()})}
    tables.plan(declare(tables, states=two), "run")
    found = {"varying": tables.outcome(declare(tables, transform=varying, states=two), 2)}
    expected = {"varying": "RowsLost: .*the sums of their hashes differ by 0x[1-9a-f]"}
    for name, (place, function, at, route, transform, times, message) in LOST.items():
        real, repeated = getattr(place, function), f"explode(array_repeat(1, {times})) twice"

        def losing(*arguments: Any, real: Any = real, at: int = at, repeated: str = repeated, **named: Any) -> Any:
            kept = arguments[at].where("name = 'a'").selectExpr(repeated, "*").drop("twice")
            return real(*arguments[:at], kept, *arguments[at + 1 :], **named)

        with monkeypatch.context() as patched:
            patched.setattr(place, function, losing)
            found[name] = tables.outcome(declare(tables, transform=transform), routing=steps.ROUTINGS[route])
        expected[name] = f"RowsLost: .*{message}"
    assert offenders(found, expected) == {}
    assert [steps.history(tables.settings, txid).seals for txid in (1, 2)] == [[], []]


STUBBORN = """
import signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while True:
    try:
        while True:
            time.sleep(0.01)
    except BaseException:
        pass
"""


@pytest.mark.promise("error:ATTEMPT_TIMED_OUT", "decision:0014")
def test_an_attempt_that_takes_too_long_gives_its_core_back_and_leaves_no_rows_out(tables: Tables, store: StateStore) -> None:
    """Whatever its Python code does: its worker ends, and with it Spark's task."""
    pid_file = tables.settings.home / "pid"

    def transform(rows: Any) -> Any:
        def stay(batches: Any) -> Any:
            for batch in batches:
                pid_file.write_text(str(os.getpid()))
                exec(STUBBORN)
                yield batch

        return rows.mapInArrow(stay, rows.schema)

    tables.write("1.csv", "name,amount\na,1\n")
    pipeline = declare(tables, transform=transform, message_timeout_seconds=6, on_poison="skip", tries=1)
    tables.plan(pipeline, "run")
    with pytest.raises(AttemptTimedOut, match="message timeout of 6 s"):
        steps.process(tables.settings, pipeline, 1, owner="test")
    history = steps.history(tables.settings, 1)
    assert (history.status.phase, history.attempts[-1]["is_poison"]) == ("failed", False)
    assert not store.turn("inbox", 1).given_up
    worker = int(pid_file.read_text())
    assert wait_until(lambda: not psutil.pid_exists(worker), 30)


@pytest.mark.usefixtures("counted_here")
def test_a_source_hears_of_commits_and_failures(settings: Settings, store: StateStore, register: Callable[..., None]) -> None:
    """Ack after a commit, fail with the error after a failed attempt. Errors in them change nothing."""
    calls: list[tuple[Any, ...]] = []
    acked: list[int] = []
    failing = {1, 2}

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

    source = Listening([[("a", 1)], [("a", 2)]], SCHEMA)
    pipeline = Pipeline("inbox", source, {"per_name": PER_NAME}, transform=failing_once(), window=1, retry_delay_seconds=0)
    register(pipeline)
    with pytest.raises(Dying):
        run_pipeline(settings, pipeline, run_id="first")
    assert calls[0] == ("fail", 1, 1, "RowsLost")
    assert set(calls[1:]) == {("ack", 1, 0), ("ack", 2, 1)}
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
