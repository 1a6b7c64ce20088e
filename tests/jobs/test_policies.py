"""Bad records, bad batches and bad luck, through Spark: what counts, is set aside, tried again, given up."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from jobs import Count, Files, FixedBatches, Pipeline, State, Sum, phases
from jobs.run import run_pipeline
from state_store import Settings, StateStore
from state_store.attempts import AirflowTry
from state_store.errors import AttemptFenced, AttemptTimedOut, BatchRetried, MalformedRecord, PermanentError, RowsLost
from tests.sources.conftest import Inbox

SCHEMA = {"name": "string", "amount": "int"}
PER_NAME = {"per_name": State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount")})}
CSV = Files("inbox", format="csv", schema=SCHEMA, max_files=1)
JSON = Files("inbox", format="json", schema=SCHEMA, max_files=1)
SLOW_SECONDS = 60


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
    """Return what waits in quarantine."""
    with StateStore.connect(inbox.settings) as store:
        return list(store.quarantined("inbox"))


def phases_of(inbox: Inbox) -> list[str]:
    """Return the phase of each batch."""
    with StateStore.connect(inbox.settings) as store:
        return [status.phase for status in store.batch_statuses("inbox")]


# quarantine


def test_records_that_cannot_be_read_are_set_aside_and_the_others_count(inbox: Inbox) -> None:
    """With reason, file and the record as it stood; counted in the same commit."""
    inbox.write("1.csv", "name,amount\na,1\nb,two\na,3\nc\n")
    pipeline = declare(inbox, on_poison="quarantine")

    assert inbox.run(pipeline) == [1]

    assert counted(inbox, pipeline) == {"a": (2, 4)}
    told = [(r["txid"], r["number"], r["origin"], r["payload"], r["is_raw"], r["reason"]) for r in waiting(inbox)]
    assert told == [
        (1, 1, "1.csv", "b,two", True, "the record does not fit the schema"),
        (1, 2, "1.csv", "c", True, "the record does not fit the schema"),
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
    """Byte for byte as they stood."""
    inbox.write("1.txt", "".join(f"{line}\n" for line in [*good, *bad]))
    pipeline = declare(inbox, source, on_poison="quarantine")
    inbox.run(pipeline)
    assert counted(inbox, pipeline) == {"a": (1, 1)}
    assert sorted(record["payload"] for record in waiting(inbox)) == sorted(bad)


def test_a_decimal_with_too_many_digits_is_set_aside_not_rounded(inbox: Inbox) -> None:
    """Neither then, nor when it is taken up again."""
    source = Files("inbox", format="csv", schema={"name": "string", "price": "decimal(10,2)"}, max_files=1)
    states = {"per_name": State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("price", "numeric(20,2)")})}
    inbox.write("1.csv", 'name,price\na,1.25\n"a, b",1.005\n')
    pipeline = declare(inbox, source, states=states, on_poison="quarantine")
    inbox.run(pipeline)
    (record,) = waiting(inbox)
    assert (record["payload"], record["reason"]) == ('"a, b",1.005', "price does not fit decimal(10,2)")

    replay(inbox, pipeline)
    assert inbox.run(pipeline, "second") == [2]
    assert {row["name"]: (row["lines"], str(row["amount"])) for row in inbox.rows(pipeline)} == {"a": (1, "1.25")}
    assert [(r["txid"], r["payload"]) for r in waiting(inbox)] == [(2, '"a, b",1.005')]


def test_records_that_fail_a_check_are_set_aside_with_its_name(inbox: Inbox) -> None:
    """The author's conditions; one that is NULL does not hold. The payload is the row as JSON."""
    inbox.write("1.csv", "name,amount\na,1\nb,-2\nc,\nd,4\n")
    pipeline = declare(
        inbox, on_poison="quarantine", check={"amount is not negative": "amount >= 0", "has a name": "name <> ''"}
    )
    inbox.run(pipeline)
    assert counted(inbox, pipeline) == {"a": (1, 1), "d": (1, 4)}
    assert [(r["payload"], r["reason"], r["is_raw"], r["origin"]) for r in waiting(inbox)] == [
        ('{"name":"b","amount":-2}', "fails the check 'amount is not negative'", False, "1.csv"),
        ('{"name":"c","amount":null}', "fails the check 'amount is not negative'", False, "1.csv"),
    ]


@pytest.mark.parametrize("policy", ["block", "skip"])
def test_without_quarantine_a_failed_check_fails_the_batch(inbox: Inbox, policy: str) -> None:
    """It says which record, where, and which check."""
    inbox.write("1.csv", "name,amount\na,1\nb,-2\n")
    pipeline = declare(inbox, on_poison=policy, tries=9, check={"amount is not negative": "amount >= 0"})
    inbox.plan(pipeline, "run")
    with pytest.raises(
        (MalformedRecord, BatchRetried), match=r"1\.csv: a record is bad \(fails the check 'amount is not negative'\)"
    ):
        phases.process_batch(inbox.settings, pipeline, 1, owner="test")
    assert counted(inbox, pipeline) == {}


def replay(inbox: Inbox, pipeline: Pipeline, txid: int | None = None) -> tuple[int, int] | None:
    """Take records out of quarantine into a new batch."""
    with StateStore.connect(inbox.settings) as store:
        return store.replay_quarantined(pipeline.spec, "test", "mended", txid=txid)


def test_a_replay_is_a_new_batch_in_which_mended_rules_apply(
    inbox: Inbox, settings: Settings, register: Callable[..., None]
) -> None:
    """Records that are good by now count once; the others return to quarantine; the source goes on where it was."""
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
        (2, "1.csv", "the record does not fit the schema"),
        (2, "1.csv", "fails the check 'not far below'"),
    ]


def test_a_replay_that_is_skipped_gives_its_records_back(inbox: Inbox) -> None:
    """What a batch took out of quarantine is not lost with it."""
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


def test_a_batch_that_keeps_failing_is_given_up_after_its_tries(inbox: Inbox) -> None:
    """The ledger says why; the batches around it count."""
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
    """They wait, processed, for a person; once it is mended everything commits in order."""
    for number in (1, 3, 4):
        inbox.write(f"{number}.csv", f"name,amount\na,{number}\n")
    bad = inbox.write("2.csv", "name,amount\nb,two\n")
    pipeline = declare(inbox, window=4)
    with pytest.raises(MalformedRecord):
        run_pipeline(inbox.settings, pipeline, run_id="run")
    assert phases_of(inbox) == ["committed", "halted", "processed", "processed"]

    with StateStore.connect(inbox.settings) as store:
        store.skip_batch(pipeline.spec, 2, "test", "it cannot be mended")
    bad.unlink()
    run_pipeline(inbox.settings, pipeline, run_id="second")
    assert counted(inbox, pipeline) == {"a": (3, 8)}
    assert phases_of(inbox) == ["committed", "skipped", "committed", "committed"]


def test_a_failure_that_passes_is_tried_again(inbox: Inbox) -> None:
    """With pauses that grow, in the same run; nothing counts twice."""
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


def test_a_transform_that_changes_its_mind_is_found_out(inbox: Inbox) -> None:
    """Rows that are not the same each time would be lost for one state and counted for another: the sums do not meet.

    Not `rand()`: a seed is drawn when the plan is analysed, and a server that remembers the plan draws one for all states.
    """
    inbox.write("1.csv", "name,amount\n" + "".join(f"n{number},{number}\n" for number in range(200)))
    pipeline = declare(
        inbox,
        transform=lambda rows: rows.where("double(java_method('java.lang.Math', 'random')) < 0.5"),
        states={**PER_NAME, "total": State(aggregates={"lines": Count()})},
    )
    inbox.plan(pipeline, "run")
    with pytest.raises(RowsLost, match=r"XOR of their hashes 0x[0-9a-f]+, which should be 0"):
        phases.process_batch(inbox.settings, pipeline, 1, owner="test")


def test_the_sums_of_every_stage_are_in_the_ledger(inbox: Inbox) -> None:
    """Count and XOR of the source's and of the transform's rows; who ran the attempt, and where."""
    inbox.write("1.csv", "name,amount\na,1\nb,2\nb,2\n")
    pipeline = declare(inbox, transform=lambda rows: rows.where("name = 'b'"))
    inbox.plan(pipeline, "run")
    task = AirflowTry("manual__1", "batch.process", 2)
    phases.process_batch(inbox.settings, pipeline, 1, owner="test", airflow=task)
    with StateStore.connect(inbox.settings) as store:
        (attempt,) = store.batch_history("inbox", 1).attempts
    assert (attempt["source_rows"], attempt["transformed_rows"], attempt["transformed_hash"]) == (3, 2, 0)  # a ^ a
    assert attempt["source_hash"] != 0
    assert attempt["staged_bytes"] > 0
    assert (attempt["airflow_run_id"], attempt["airflow_task_id"], attempt["airflow_try"]) == ("manual__1", "batch.process", 2)
    assert attempt["spark_application"].startswith("local-")
    assert attempt["spark_tag"] == "tidegate-inbox-1-1"
    assert attempt["started_at"] <= attempt["staged_at"] <= attempt["sealed_at"]


def test_a_bad_value_is_found_though_nothing_needs_its_column(inbox: Inbox) -> None:
    """Also without tracking, when Spark would not even parse it."""
    inbox.write("1.csv", "name,amount\na,1\nb,two\n")
    states = {"per_name": State(key={"name": "text"}, aggregates={"lines": Count()})}
    pipeline = declare(inbox, states=states, tracking="off")
    inbox.plan(pipeline, "run")
    with pytest.raises(MalformedRecord, match="line 3"):
        phases.process_batch(inbox.settings, pipeline, 1, owner="test")

    tolerant = declare(inbox, states=states, tracking="off", on_poison="quarantine")
    phases.process_batch(inbox.settings, tolerant, 1, owner="test")
    phases.commit_batch(inbox.settings, tolerant, 1, owner="test")
    assert [record["payload"] for record in waiting(inbox)] == ["b,two"]


@pytest.mark.parametrize(("lowered", "source_hash", "transformed_hash"), [("off", None, None), ("unanchored", True, None)])
def test_tracking_can_be_lowered(inbox: Inbox, lowered: str, source_hash: object, transformed_hash: object) -> None:
    """Off for the pipeline, or for one output; what is lost is told."""
    inbox.write("1.csv", "name,amount\na,1\n")
    key, aggregates = {"name": "text"}, {"lines": Count(), "amount": Sum("amount")}
    states = {"per_name": State(key=key, aggregates=aggregates, unanchored=lowered == "unanchored")}
    pipeline = declare(inbox, states=states, tracking="off" if lowered == "off" else "full")
    inbox.run(pipeline)
    assert counted(inbox, pipeline) == {"a": (1, 1)}
    with StateStore.connect(inbox.settings) as store:
        (attempt,) = store.batch_history("inbox", 1).attempts
    assert (attempt["source_hash"] is None) == (source_hash is None)
    assert attempt["transformed_hash"] is transformed_hash
    assert "go unnoticed" in pipeline.lost_tracking[0]


# time


def slow(rows: Any) -> Any:
    """Take a minute over the first row, unless somebody interrupts it."""

    def crawl(batches: Any) -> Any:
        for batch in batches:
            time.sleep(SLOW_SECONDS)
            yield batch

    return rows.mapInPandas(crawl, rows.schema)


def test_an_attempt_that_takes_too_long_is_ended_and_tried_again(inbox: Inbox) -> None:
    """Its Spark job is interrupted, not left running."""
    inbox.write("1.csv", "name,amount\na,1\n")
    pipeline = declare(inbox, transform=slow, message_timeout_seconds=3)
    inbox.plan(pipeline, "run")
    started = time.monotonic()
    with pytest.raises(AttemptTimedOut, match="message timeout of 3 s"):
        phases.process_batch(inbox.settings, pipeline, 1, owner="test")
    assert time.monotonic() - started < SLOW_SECONDS
    assert phases_of(inbox) == ["failed"]


def test_the_spark_job_of_a_fenced_attempt_is_interrupted(inbox: Inbox, settings: Settings) -> None:
    """The newer attempt ends it; the older learns that it was fenced, and its work never counts."""
    inbox.write("1.csv", "name,amount\na,1\n")
    turtle = declare(inbox, transform=slow)
    hare = Pipeline(name="inbox", source=CSV, states=PER_NAME)
    inbox.plan(turtle, "run")
    ended: list[BaseException] = []

    def run_turtle() -> None:
        try:
            phases.process_batch(settings, turtle, 1, owner="turtle")
        except AttemptFenced as fenced:
            ended.append(fenced)

    thread = threading.Thread(target=run_turtle)
    thread.start()
    with StateStore.connect(settings) as store:
        deadline = time.monotonic() + 30
        while not [a for a in store.batch_history("inbox", 1).attempts if a["spark_tag"]]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    time.sleep(3)  # long enough for Spark to be in the middle of it; if it is not, the test still holds
    started = time.monotonic()
    phases.process_batch(settings, hare, 1, owner="hare")
    phases.commit_batch(settings, hare, 1, owner="hare")
    thread.join(SLOW_SECONDS / 2)
    assert not thread.is_alive()
    assert time.monotonic() - started < SLOW_SECONDS / 2
    assert [type(error) for error in ended] == [AttemptFenced]
    assert counted(inbox, hare) == {"a": (1, 1)}


# callbacks


def test_the_source_hears_of_commits_and_of_failures(settings: Settings, register: Callable[..., None]) -> None:
    """After a commit: ack; after a failed attempt: fail with the error. What they raise changes nothing."""
    heard: list[tuple] = []

    class Listening(FixedBatches):
        def ack(self, attempt: Any, settings: Settings) -> None:  # noqa: ARG002
            heard.append(("ack", attempt.txid, attempt.source_metadata["position"]))
            raise OSError("nobody listens")

        def fail(self, attempt: Any, error: Exception, settings: Settings) -> None:  # noqa: ARG002
            heard.append(("fail", attempt.txid, attempt.number, type(error).__name__))

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
    assert heard == [("fail", 1, 1, "PermanentError"), ("ack", 1, 0), ("ack", 2, 1)]
