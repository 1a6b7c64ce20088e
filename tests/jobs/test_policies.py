"""Bad records and failing batches, through Spark: set aside, replayed, tried again, given up."""

import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import sqlalchemy as sa

from tests import steps
from tests.sources.conftest import Inbox
from tidegate.jobs import Count, Files, FixedBatches, Pipeline, State, Sum
from tidegate.jobs.compute import batch_attempt
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.compute.stage import row_tracking
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import (
    AttemptFenced,
    AttemptTimedOut,
    BatchRetried,
    MalformedRecord,
    PermanentError,
    PipelinePaused,
    RowsLost,
    SourceChanged,
)
from tidegate.state_store.ledger import tables
from tidegate.state_store.seal.attempts import AirflowTry

SCHEMA = {"name": "string", "amount": "int"}
PER_NAME = {"per_name": State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")})}
CSV = Files("inbox", format="csv", schema=SCHEMA, max_files=1)
JSON = Files("inbox", format="json", schema=SCHEMA, max_files=1)
SLOW_SECONDS = 60
# Of files, a transform gets rows that are counted only; the safe route hashes all columns.
ALL_HASHED = steps.ROUTINGS["safe"]


@pytest.fixture
def inbox(settings: Settings, register: Callable[..., None]) -> Inbox:
    """An empty folder and a pipeline over it."""
    return Inbox(settings, register)


def declare(inbox: Inbox, source: Any = CSV, **pipeline: Any) -> Pipeline:
    """Declare and register a pipeline that pauses little between its tries."""
    return inbox.declare(source, **{"states": PER_NAME, "retry_delay_seconds": 0, **pipeline})


def counted(inbox: Inbox, pipeline: Pipeline) -> dict[str, tuple[int, int]]:
    """Return the state by name."""
    return {row["name"]: (row["lines"], row["amount"]) for row in inbox.rows(pipeline)}


def waiting(inbox: Inbox) -> list[Mapping[str, Any]]:
    """Return the records in quarantine."""
    with StateStore.connect(inbox.settings) as store:
        return list(store.quarantined("inbox"))


def phases_of(inbox: Inbox) -> list[str]:
    """Return the phase of each batch."""
    with StateStore.connect(inbox.settings) as store:
        return [status.phase for status in store.batch_statuses("inbox")]


# quarantine


def test_records_that_cannot_be_read_are_set_aside_and_the_others_count(inbox: Inbox) -> None:
    """With reason, file and the raw record; counted in the same commit."""
    inbox.write("1.csv", "name,amount\na,1\nb,two\na,3\nc\n")
    pipeline = declare(inbox, on_poison="quarantine")

    assert inbox.run(pipeline) == [1]

    assert counted(inbox, pipeline) == {"a": (2, 4)}
    records = [(r["txid"], r["number"], r["origin"], r["payload"], r["is_raw"], r["reason"]) for r in waiting(inbox)]
    assert records == [
        (1, 1, "1.csv, line 3", "b,two", True, "column amount: 'two' is no int"),
        (1, 2, "1.csv, line 5", "c", True, "it has 1 value(s), the 2 columns need one each"),
    ]
    with StateStore.connect(inbox.settings) as store:
        history = store.batch_history("inbox", 1)
    (attempt,) = history.attempts
    assert (attempt["source_rows"], attempt["quarantined_rows"], attempt["transformed_rows"]) == (4, 2, 2)
    assert history.commit is not None
    assert history.commit["quarantined_rows"] == 2


TWICE = '{"name": "b", "amount": 2} {"name": "c", "amount": 3}'
BAD_RECORDS: dict[str, tuple[Files, list[str], list[str]]] = {
    "broken JSON": (JSON, ['{"name": "a", "amount": 1}'], ['{"name": "b"', '{"name": "c", "amount": "x"}']),
    "two records in a line": (JSON, ['{"name": "a", "amount": 1}'], [TWICE]),
    "one value too many": (CSV, ["name,amount", "a,1"], ['"b ""x"", y",2,3']),
}


@pytest.mark.parametrize(("source", "good", "bad"), BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_every_text_format_sets_bad_records_aside(inbox: Inbox, source: Files, good: list[str], bad: list[str]) -> None:
    """They are kept byte for byte."""
    inbox.write("1.txt", "".join(f"{line}\n" for line in [*good, *bad]))
    pipeline = declare(inbox, source, on_poison="quarantine")
    inbox.run(pipeline)
    assert counted(inbox, pipeline) == {"a": (1, 1)}
    assert sorted(record["payload"] for record in waiting(inbox)) == sorted(bad)


def test_a_decimal_with_too_many_digits_is_set_aside_not_rounded(inbox: Inbox) -> None:
    """Neither at first nor in a replay."""
    source = Files("inbox", format="csv", schema={"name": "string", "price": "decimal(10,2)"}, max_files=1)
    states = {"per_name": State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("price", "numeric(20,2)")})}
    inbox.write("1.csv", 'name,price\na,1.25\n"a, b",1.005\n')
    pipeline = declare(inbox, source, states=states, on_poison="quarantine")
    inbox.run(pipeline)
    (record,) = waiting(inbox)
    assert record["payload"] == '"a, b",1.005'
    assert record["reason"] == "column price: '1.005' is no decimal(10,2) (nothing is rounded)"

    replay(inbox, pipeline)
    assert inbox.run(pipeline, "second") == [2]
    assert {row["name"]: (row["lines"], str(row["amount"])) for row in inbox.rows(pipeline)} == {"a": (1, "1.25")}
    assert [(r["txid"], r["payload"]) for r in waiting(inbox)] == [(2, '"a, b",1.005')]


def test_records_that_fail_a_check_are_set_aside_with_its_name(inbox: Inbox) -> None:
    """The author's conditions; NULL does not fulfil one. The payload is the row as JSON."""
    inbox.write("1.csv", "name,amount\na,1\nb,-2\nc,\nd,4\n")
    pipeline = declare(
        inbox, on_poison="quarantine", check={"amount is not negative": "amount >= 0", "has a name": "name <> ''"}
    )
    inbox.run(pipeline)
    assert counted(inbox, pipeline) == {"a": (1, 1), "d": (1, 4)}
    assert [(r["payload"], r["reason"], r["is_raw"], r["origin"]) for r in waiting(inbox)] == [
        ('{"name":"b","amount":-2}', "fails the check 'amount is not negative'", False, "1.csv, line 3"),
        ('{"name":"c","amount":null}', "fails the check 'amount is not negative'", False, "1.csv, line 4"),
    ]


def test_records_that_no_state_can_keep_are_set_aside(inbox: Inbox) -> None:
    """A key that is NULL, too long, or holds a NUL character blocks no batch: the record waits in quarantine."""
    records = [{"name": "a", "amount": 1}, {"name": None, "amount": 2}, {"name": "x" * 2001, "amount": 3}]
    records += [{"name": "a\0b", "amount": 4}, {"name": "x" * 2000, "amount": 5}]
    inbox.write("1.json", "\n".join(map(json.dumps, records)))
    pipeline = declare(inbox, JSON, on_poison="quarantine")
    inbox.run(pipeline)

    assert counted(inbox, pipeline) == {"a": (1, 1), "x" * 2000: (1, 5)}
    assert [(r["reason"], json.loads(r["payload"]), r["origin"]) for r in waiting(inbox)] == [
        ("key column name is NULL", records[1], "1.json, line 2"),
        ("column name takes 2001 bytes, the limit is 2000", records[2], "1.json, line 3"),
        ("column name holds a NUL character", records[3], "1.json, line 4"),
    ]
    before = [(r["payload"], r["reason"]) for r in waiting(inbox)]
    replay(inbox, pipeline)
    assert inbox.run(pipeline, "second") == [2]
    assert [(r["payload"], r["reason"]) for r in waiting(inbox)] == before


KEPT_EXACTLY: dict[str, tuple[str, str]] = {
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


def two_records_of(inbox: Inbox, kind: str) -> dict[str, Any]:
    """Write a good and a negative record with the same value of a type; return what a pipeline over them declares."""
    text, _ = KEPT_EXACTLY[kind]
    inbox.write("1.csv", f"name,amount,value\na,1,{text}\na,-1,{text}\n")
    return {
        "source": Files("inbox", format="csv", schema={**SCHEMA, "value": kind.partition(" ")[0]}, max_files=1),
        "states": {"per_name": State(key={"name": "text", "text": "text"}, aggregates={"lines": Count()})},
        "transform": lambda rows: rows.selectExpr("name", "CAST(value AS string) AS text"),
    }


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KEPT_EXACTLY)
def test_a_record_that_waited_has_lost_nothing(inbox: Inbox, kind: str) -> None:
    """Six digits of a second, all digits of a number: after the replay the state is that of a clean run."""
    declared = two_records_of(inbox, kind)
    strict = declare(inbox, **declared, on_poison="quarantine", check={"positive": "amount > 0"})
    inbox.run(strict)
    (record,) = waiting(inbox)
    assert not record["is_raw"]

    milder = declare(inbox, **declared, on_poison="quarantine", version=2)
    replay(inbox, milder)
    assert inbox.run(milder, "second") == [2]
    assert inbox.rows(milder) == [{"name": "a", "text": KEPT_EXACTLY[kind][1], "lines": 2}]


def test_a_bad_record_that_is_too_long_keeps_its_beginning(inbox: Inbox) -> None:
    """It blocks no batch; a replay says that the rest is missing."""
    long = "x" * 9_000_000
    inbox.write("1.csv", f"name,amount\na,1\n{long},two\n")
    pipeline = declare(inbox, on_poison="quarantine")
    inbox.run(pipeline)
    assert counted(inbox, pipeline) == {"a": (1, 1)}
    (record,) = waiting(inbox)
    kept = json.loads(record["payload"])
    assert (kept["bytes"], kept["beginning"][:9]) == (9_000_004, "x" * 9)
    replay(inbox, pipeline)
    assert inbox.run(pipeline, "second") == [2]
    (record,) = waiting(inbox)
    assert record["reason"] == "it was too long to be kept: only the beginning of its 9000004 bytes is here"
    assert json.loads(record["payload"]) == kept


@pytest.mark.parametrize("policy", ["block", "skip"])
def test_without_quarantine_a_failed_check_fails_the_batch(inbox: Inbox, policy: str) -> None:
    """The error names the record, its place, and the check."""
    inbox.write("1.csv", "name,amount\na,1\nb,-2\n")
    pipeline = declare(inbox, on_poison=policy, tries=9, check={"amount is not negative": "amount >= 0"})
    inbox.plan(pipeline, "run")
    with pytest.raises(
        (MalformedRecord, BatchRetried), match=r"1\.csv, line 3: a record is bad \(fails the check 'amount is not negative'\)"
    ):
        steps.process(inbox.settings, pipeline, 1, owner="test")
    assert counted(inbox, pipeline) == {}


def replay(inbox: Inbox, pipeline: Pipeline, txid: int | None = None) -> tuple[int, int] | None:
    """Take records out of quarantine into a new batch."""
    with StateStore.connect(inbox.settings) as store:
        return store.replay_quarantined(pipeline.spec, "test", "fixed", txid=txid)


def test_a_replay_is_a_new_batch_under_the_new_rules(inbox: Inbox, settings: Settings, register: Callable[..., None]) -> None:
    """Records that are good now count once; the others return to quarantine; the source continues where it was."""
    inbox.write("1.csv", "name,amount\na,1\nb,-2\nc,x\nd,-40\n")
    strict = declare(inbox, on_poison="quarantine", check={"not negative": "amount >= 0"})
    inbox.run(strict)
    assert replay(inbox, strict) == (2, 3)
    assert replay(inbox, strict) is None
    inbox.write("2.csv", "name,amount\na,10\n")

    milder = Pipeline(
        name="inbox", source=CSV, states=PER_NAME, on_poison="quarantine", check={"not far below": "amount >= -10"}, version=2
    )
    register(milder)
    assert inbox.run(milder, "second") == [2, 3]

    assert counted(inbox, milder) == {"a": (2, 11), "b": (1, -2)}
    assert [(r["txid"], r["origin"], r["reason"]) for r in waiting(inbox)] == [
        (2, "1.csv, line 4", "column amount: 'x' is no int"),
        (2, "1.csv, line 5", "fails the check 'not far below'"),
    ]


def test_a_replay_that_misses_a_record_is_refused(inbox: Inbox, as_owner: Callable[..., Any]) -> None:
    """A row was deleted from quarantine after the replay was opened; the batch's metadata has the number of records."""
    inbox.write("1.csv", "name,amount\na,-1\nb,-2\nc,-3\n")
    pipeline = declare(inbox, on_poison="quarantine", check={"not negative": "amount >= 0"})
    inbox.run(pipeline)
    assert replay(inbox, pipeline) == (2, 3)
    as_owner(sa.delete(tables.quarantine).where(tables.quarantine.c.payload.contains("-2")))

    with pytest.raises(SourceChanged, match=r"3 records were taken out of quarantine .* 2 are there"):
        steps.process(inbox.settings, pipeline, 2, owner="test")


def test_a_replay_that_is_skipped_gives_its_records_back(inbox: Inbox) -> None:
    """The records that a batch took out of quarantine are not lost with it."""
    inbox.write("1.csv", "name,amount\nb,-2\n")
    pipeline = declare(inbox, on_poison="quarantine", check={"not negative": "amount >= 0"})
    inbox.run(pipeline)
    replay(inbox, pipeline)
    assert waiting(inbox) == []
    with StateStore.connect(inbox.settings) as store:
        attempt = store.start_attempt(pipeline.spec, 2, "test")
        store.fail_attempt(attempt, "TEST: failed")
        assert store.skip_batch(pipeline.spec, 2, "test", "no") is not None
    assert [record["payload"] for record in waiting(inbox)] == ['{"name":"b","amount":-2}']


# skip


@pytest.mark.promise("limit:Pipeline.tries", "error:BATCH_RETRIED")
def test_a_batch_that_keeps_failing_is_given_up_after_its_tries(inbox: Inbox) -> None:
    """The ledger has the reason; the batches around it count."""
    for number in (1, 3):
        inbox.write(f"{number}.csv", f"name,amount\na,{number}\n")
    inbox.write("2.csv", "name,amount\nb,two\n")
    pipeline = declare(inbox, on_poison="skip", tries=3)

    result = run_pipeline(inbox.settings, pipeline, run_id="run")

    assert [commit.skipped_reason is None for commit in result.commits] == [True, False, True]
    assert counted(inbox, pipeline) == {"a": (2, 4)}
    with StateStore.connect(inbox.settings) as store:
        history = store.batch_history("inbox", 2)
    assert [attempt["error"].partition(":")[0] for attempt in history.attempts] == ["MALFORMED_RECORD"] * 3
    assert history.commit is not None
    assert "it failed in try 3 of 3, with MALFORMED_RECORD" in history.commit["skipped_reason"]
    assert history.status.phase == "skipped"


def test_a_batch_that_blocks_lets_later_ones_be_processed(inbox: Inbox) -> None:
    """They wait, processed, for a person; once the batch is skipped, the others commit in order."""
    for number in (1, 3, 4):
        inbox.write(f"{number}.csv", f"name,amount\na,{number}\n")
    bad = inbox.write("2.csv", "name,amount\nb,two\n")
    pipeline = declare(inbox, window=4)
    with pytest.raises(MalformedRecord):
        run_pipeline(inbox.settings, pipeline, run_id="run")
    assert phases_of(inbox) == ["committed", "halted", "processed", "processed"]

    with StateStore.connect(inbox.settings) as store:
        store.skip_batch(pipeline.spec, 2, "test", "it cannot be fixed")
    bad.unlink()
    run_pipeline(inbox.settings, pipeline, run_id="second")
    assert counted(inbox, pipeline) == {"a": (3, 8)}
    assert phases_of(inbox) == ["committed", "skipped", "committed", "committed"]


def test_a_failure_that_passes_is_tried_again(inbox: Inbox) -> None:
    """With growing pauses, in the same run; nothing counts twice."""
    inbox.write("1.csv", "name,amount\na,1\n")
    failures = iter([RowsLost("first try"), RowsLost("second try")])

    def flaky(rows: Any) -> Any:
        if error := next(failures, None):
            raise error
        return rows

    pipeline = declare(inbox, transform=flaky, tries=3)
    run_pipeline(inbox.settings, pipeline, run_id="run")
    assert counted(inbox, pipeline) == {"a": (1, 1)}
    with StateStore.connect(inbox.settings) as store:
        assert len(store.batch_history("inbox", 1).attempts) == 3


# the acker


@pytest.mark.promise("error:ROWS_LOST", "performance:with-several-states-rows-are-observed-on")
def test_a_transform_with_varying_results_is_detected(inbox: Inbox) -> None:
    """Rows that differ each time would be lost for one state and counted for another: the sums do not agree.

    This is not `rand()`, which is refused by the check of the plan.
    """
    inbox.write("1.csv", "name,amount\n" + "".join(f"n{number},{number}\n" for number in range(200)))
    pipeline = declare(
        inbox,
        transform=lambda rows: rows.where("double(java_method('java.lang.Math', 'random')) < 0.5"),
        states={**PER_NAME, "total": State(aggregates={"lines": Count()})},
    )
    inbox.plan(pipeline, "run")
    with pytest.raises(RowsLost, match=r"sums of their hashes differ by 0x[1-9a-f]"):
        steps.process(inbox.settings, pipeline, 1, owner="test")


@pytest.mark.promise("decision:0011")
@pytest.mark.parametrize("route", ["chosen", "safe"])
def test_rows_lost_and_doubled_in_pairs_are_noticed(inbox: Inbox, monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    """If a, a, a, a arrive for a, a, b, b, the number of rows and the XOR of their ids agree, but not the sum."""
    inbox.write("1.csv", "name,amount\na,1\na,1\nb,1\nb,1\n")
    pipeline = declare(inbox, transform=lambda rows: rows)
    real = batch_attempt.aggregate

    def corrupting(rows: Any, *arguments: Any, **named: Any) -> Any:
        doubled = rows.where("name = 'a'").selectExpr("explode(array(1, 1)) AS twice", "*").drop("twice")
        return real(doubled, *arguments, **named)

    monkeypatch.setattr(batch_attempt, "aggregate", corrupting)
    inbox.plan(pipeline, "run")
    with pytest.raises(RowsLost, match=r"of 4 rows 4 arrived .*the sums of their hashes differ by 0x[1-9a-f]"):
        steps.process(inbox.settings, pipeline, 1, owner="test", routing=steps.ROUTINGS[route])


@pytest.mark.promise("decision:0011")
def test_hashes_are_added_up_modulo_two_to_the_64(inbox: Inbox) -> None:
    """For any hashes: Spark's own sum would fail at the first number beyond 64 bits. Without rows the sum is NULL."""
    dice = random.Random(1)
    extremes = [-(2**63), 2**63 - 1, -1, 0, 1, 2**32, 2**32 - 1, -(2**32), -(2**32) - 1]
    hashes = [dice.choice([dice.choice(extremes), dice.randrange(-(2**63), 2**63)]) for _ in range(1000)]
    groups = [[-(2**63)] * 5, [2**63 - 1] * 7, [-1] * 3, hashes]
    with spark_session(inbox.settings, "inbox") as session:
        rows = session.createDataFrame([(n, h) for n, group in enumerate(groups) for h in group], "n int, h bigint")
        found = {row.n: row.total for row in rows.groupBy("n").agg(row_tracking.hash_sum("h").alias("total")).collect()}
        (nothing,) = rows.where("n < 0").agg(row_tracking.hash_sum("h").alias("total")).collect()

    assert found == {n: row_tracking.signed(sum(group)) for n, group in enumerate(groups)}
    assert nothing.total is None
    assert [row_tracking.signed(number) for number in (2**63, -(2**63) - 1, 2**64, 5)] == [-(2**63), 2**63 - 1, 0, 5]


def test_the_sums_of_every_stage_are_in_the_ledger(inbox: Inbox) -> None:
    """Count and sum of hashes of the source's and the transform's rows; the task and the Spark job of the attempt."""
    inbox.write("1.csv", "name,amount\na,1\nb,2\nb,2\n")
    pipeline = declare(inbox, transform=lambda rows: rows.where("name = 'b'"))
    inbox.plan(pipeline, "run")
    task = AirflowTry("manual__1", "batch.process", 2)
    steps.process(inbox.settings, pipeline, 1, owner="test", airflow=task, routing=ALL_HASHED)
    with StateStore.connect(inbox.settings) as store:
        (attempt,) = store.batch_history("inbox", 1).attempts
    assert (attempt["source_rows"], attempt["transformed_rows"]) == (3, 2)
    assert attempt["transformed_hash_sum"] % 2 == 0  # twice the hash of b
    assert len({0, None, attempt["transformed_hash_sum"], attempt["source_hash_sum"]}) == 4
    assert attempt["staged_bytes"] > 0
    assert (attempt["airflow_run_id"], attempt["airflow_task_id"], attempt["airflow_try"]) == ("manual__1", "batch.process", 2)
    assert attempt["spark_application"].startswith("local-")
    assert attempt["spark_tag"] == "tidegate-inbox-1-1"
    assert attempt["started_at"] <= attempt["staged_at"] <= attempt["sealed_at"]


def test_a_bad_value_in_an_unused_column_is_found(inbox: Inbox) -> None:
    """Even without tracking, when Spark would not parse the column."""
    inbox.write("1.csv", "name,amount\na,1\nb,two\n")
    states = {"per_name": State(key={"name": "text"}, aggregates={"lines": Count()})}
    pipeline = declare(inbox, states=states, tracking="off")
    inbox.plan(pipeline, "run")
    with pytest.raises(MalformedRecord, match="line 3"):
        steps.process(inbox.settings, pipeline, 1, owner="test")

    tolerant = declare(inbox, states=states, tracking="off", on_poison="quarantine")
    steps.process(inbox.settings, tolerant, 1, owner="test")
    steps.commit(inbox.settings, tolerant, 1, owner="test")
    assert [record["payload"] for record in waiting(inbox)] == ["b,two"]


@pytest.mark.parametrize(("reduced", "source_hash", "transformed_hash"), [("off", None, None), ("unanchored", True, None)])
def test_tracking_can_be_reduced(inbox: Inbox, reduced: str, source_hash: object, transformed_hash: object) -> None:
    """Off for the pipeline, or for one state; the pipeline says which losses go unnoticed."""
    inbox.write("1.csv", "name,amount\na,1\n")
    key, aggregates = {"name": "text"}, {"lines": Count(), "amount": Sum("amount")}
    states = {"per_name": State(key=key, aggregates=aggregates, unanchored=reduced == "unanchored")}
    pipeline = declare(inbox, states=states, tracking="off" if reduced == "off" else "full")
    inbox.run(pipeline)
    assert counted(inbox, pipeline) == {"a": (1, 1)}
    with StateStore.connect(inbox.settings) as store:
        (attempt,) = store.batch_history("inbox", 1).attempts
    assert (attempt["source_hash_sum"] is None) == (source_hash is None)
    assert attempt["transformed_hash_sum"] is transformed_hash
    assert "go unnoticed" in pipeline.lost_tracking[0]


# time


def slow(rows: Any) -> Any:
    """Take a minute over the first rows, unless interrupted."""

    def crawl(batches: Any) -> Any:
        for batch in batches:
            time.sleep(SLOW_SECONDS)
            yield batch

    return rows.mapInPandas(crawl, rows.schema)


@pytest.mark.promise("error:ATTEMPT_TIMED_OUT")
def test_an_attempt_that_takes_too_long_is_ended_and_tried_again(inbox: Inbox) -> None:
    """Its Spark job is interrupted, not left running."""
    inbox.write("1.csv", "name,amount\na,1\n")
    pipeline = declare(inbox, transform=slow, message_timeout_seconds=3)
    inbox.plan(pipeline, "run")
    started = time.monotonic()
    with pytest.raises(AttemptTimedOut, match="message timeout of 3 s"):
        steps.process(inbox.settings, pipeline, 1, owner="test")
    assert time.monotonic() - started < SLOW_SECONDS
    assert phases_of(inbox) == ["failed"]


@pytest.mark.promise("decision:0014")
def test_the_spark_job_of_a_fenced_attempt_is_interrupted(inbox: Inbox, settings: Settings) -> None:
    """The newer attempt ends it; the older learns that it was fenced, and its work never counts."""
    inbox.write("1.csv", "name,amount\na,1\n")
    turtle = declare(inbox, transform=slow)
    hare = Pipeline(name="inbox", source=CSV, states=PER_NAME)
    inbox.plan(turtle, "run")
    ended: list[BaseException] = []

    def run_turtle() -> None:
        try:
            steps.process(settings, turtle, 1, owner="turtle")
        except AttemptFenced as fenced:
            ended.append(fenced)

    thread = threading.Thread(target=run_turtle)
    thread.start()
    with StateStore.connect(settings) as store:
        deadline = time.monotonic() + 30
        while not [a for a in store.batch_history("inbox", 1).attempts if a["spark_tag"]]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    time.sleep(3)  # most often Spark is in the middle of the job then; if it is not, the test still holds
    started = time.monotonic()
    steps.process(settings, hare, 1, owner="hare")
    steps.commit(settings, hare, 1, owner="hare")
    thread.join(SLOW_SECONDS / 2)
    assert not thread.is_alive()
    assert time.monotonic() - started < SLOW_SECONDS / 2
    assert [type(error) for error in ended] == [AttemptFenced]
    assert counted(inbox, hare) == {"a": (1, 1)}


# callbacks


def test_the_source_is_called_after_commits_and_failures(settings: Settings, register: Callable[..., None]) -> None:
    """Ack after a commit, fail with the error after a failed attempt. Errors in them change nothing."""
    calls: list[tuple] = []

    class Listening(FixedBatches):
        def ack(self, attempt: Any, settings: Settings) -> None:  # noqa: ARG002
            calls.append(("ack", attempt.txid, attempt.source_metadata["position"]))
            raise OSError("no listener")

        def fail(self, attempt: Any, error: Exception, settings: Settings) -> None:  # noqa: ARG002
            calls.append(("fail", attempt.txid, attempt.number, type(error).__name__))

    failures = iter([PermanentError("not yet")])

    def fails_once(rows: Any) -> Any:
        if error := next(failures, None):
            raise error
        return rows

    pipeline = Pipeline(
        name="inbox", source=Listening([[("a", 1)], [("a", 2)]], SCHEMA), states=PER_NAME, transform=fails_once, window=1
    )
    register(pipeline)
    with pytest.raises(PermanentError):
        run_pipeline(settings, pipeline, run_id="first")
    run_pipeline(settings, pipeline, run_id="second")
    assert calls[0] == ("fail", 1, 1, "PermanentError")
    assert set(calls[1:]) == {("ack", 1, 0), ("ack", 2, 1)}


def test_missing_acks_are_given_by_the_next_run(settings: Settings, register: Callable[..., None]) -> None:
    """A process that dies between its commit and the ack, or a source that raises, leaves the ack to the next plan."""
    acked: list[int] = []
    is_failing = [True]

    class Dying(BaseException):
        pass

    class Listening(FixedBatches):
        def ack(self, attempt: Any, settings: Settings) -> None:  # noqa: ARG002
            if attempt.txid == 2 and not acked:
                raise Dying
            if is_failing[0]:
                raise OSError("no listener")
            acked.append(attempt.txid)

    pipeline = Pipeline(name="inbox", source=Listening([[("a", 1)], [("a", 2)]], SCHEMA), states=PER_NAME, window=1)
    register(pipeline)
    with pytest.raises(Dying):
        run_pipeline(settings, pipeline, run_id="first")
    with StateStore.connect(settings) as store:
        assert store.committed("inbox") == 2
        assert [commit.txid for commit in store.awaiting_acks("inbox", 10)] == [1, 2]

        is_failing[0] = False
        store.pause("inbox", "me", "the listener moves")
        with pytest.raises(PipelinePaused):
            run_pipeline(settings, pipeline, run_id="paused")
        assert acked == []
        store.resume("inbox", "me", "it has moved")
        assert run_pipeline(settings, pipeline, run_id="second").txids == []

        assert acked == [1, 2]
        assert store.awaiting_acks("inbox", 10) == []
    run_pipeline(settings, pipeline, run_id="third")
    assert acked == [1, 2]


@pytest.mark.parametrize("routing", ["shuffled", "safe"])
def test_attempts_are_compared_whatever_policy_and_checks_they_had(inbox: Inbox, routing: str) -> None:
    """A batch that was sealed before the policy changed is read again: the same rows have the same hashes."""
    source = Files("inbox", format="csv", schema={"name": "string", "note": "string", "amount": "int"}, max_files=1)
    inbox.routing = steps.ROUTINGS[routing]
    inbox.write("1.csv", "name,note,amount\na,x,1\nb,x,two\n")
    inbox.write("2.csv", "name,note,amount\na,x,10\nc,y,-5\n")
    blocking = declare(inbox, source)
    first, second = inbox.plan(blocking, "run")
    with pytest.raises(MalformedRecord):
        steps.process(inbox.settings, blocking, first, owner="run", routing=inbox.routing)
    steps.process(inbox.settings, blocking, second, owner="run", routing=inbox.routing)
    aside = declare(inbox, source, on_poison="quarantine")
    for txid in (first, second):
        steps.process(inbox.settings, aside, txid, owner="aside", routing=inbox.routing, mode="restage")
    checked = declare(inbox, source, on_poison="quarantine", check={"not negative": "amount >= 0"})
    for txid in (first, second):
        steps.process(inbox.settings, checked, txid, owner="checked", routing=inbox.routing, mode="restage")
    for txid in (first, second):
        steps.commit(inbox.settings, checked, txid, owner="checked")
    assert counted(inbox, checked) == {"a": (2, 11)}
    assert len(waiting(inbox)) == 2
