"""`tidegate run` sends its trace to a collector if OpenTelemetry's variables name one, and its log as JSON if asked."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine, write_file, write_flights
from tests.collector import Collector, Span, collector

ROW = "2013,1,1,517,2,UA,1545,EWR,IAH,1400"
ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
SECRET = "hunter2,rosebud"  # a malformed record; what it holds must not leave the machine


@pytest.fixture
def collecting(tmp_path: Path) -> Iterator[Collector]:
    """A collector that listens."""
    with collector(tmp_path / "traces.jsonl") as made:
        yield made


def by_name(spans: list[Span], name: str) -> list[Span]:
    """Return the spans of a name in the order of their txids."""
    return sorted((span for span in spans if span.name == name), key=lambda span: span.attributes.get("tidegate.txid", 0))


@pytest.mark.soak
def test_a_run_is_one_trace_of_nested_spans(tidegate: CommandLine, collecting: Collector) -> None:
    """Each attempt has its spans, within each other as they ran, and the wait ends where the commit begins."""
    for day in range(1, 9):
        write_flights(tidegate.settings.home, day, ROW)
    outer = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    done = tidegate.apart("run", "flights", **collecting.environment(), TRACEPARENT=outer)

    assert done.returncode == 0, done.stderr
    spans = collecting.spans()
    (run,) = by_name(spans, "run")
    assert (run.trace_id, run.parent_id, run.error) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", None)
    assert {span.trace_id for span in spans} == {run.trace_id}
    assert {span.service for span in spans} == {"tidegate"}
    assert {span.attributes["tidegate.pipeline"] for span in spans} == {"flights"}
    (plan,) = by_name(spans, "plan")
    assert plan.attributes["tidegate.first_txid"] == 1
    for name in ("process", "wait", "commit"):
        assert [span.attempt for span in by_name(spans, name)] == [
            (txid, 1) for txid in range(1, len(by_name(spans, "process")) + 1)
        ]
    for process, stage, seal, wait, commit in zip(
        *(by_name(spans, name) for name in ("process", "stage", "seal", "wait", "commit")), strict=True
    ):
        assert {span.parent_id for span in (plan, process, wait, commit)} == {run.span_id}
        assert {stage.parent_id, seal.parent_id} == {process.span_id}
        assert process.contains(stage)
        assert process.contains(seal)
        assert stage.end == seal.begin
        assert seal.end == wait.begin
        assert wait.end == commit.begin
        assert run.contains(process)
        assert run.contains(commit)


@pytest.mark.soak
def test_a_failed_run_says_the_code_and_no_data(tidegate: CommandLine, collecting: Collector) -> None:
    """Messages quote records; a trace goes to another machine."""
    write_file(tidegate.settings.home, "flights/2013-01-01.csv", ",".join(["year"] * 10), SECRET)
    done = tidegate.apart("run", "flights", **collecting.environment())
    assert done.returncode == 1
    assert collecting.spans()
    (process,), (run,) = (by_name(collecting.spans(), name) for name in ("process", "run"))
    assert process.error == run.error == process.attributes["error.type"]
    assert process.error
    assert process.error in done.stderr or process.error.isupper()
    assert "hunter2" not in collecting.file.read_text()
    assert by_name(collecting.spans(), "commit") == []


@pytest.mark.soak
def test_a_collector_that_does_not_answer_fails_nothing(tidegate: CommandLine, collecting: Collector) -> None:
    """The run commits all the same; what is lost is its trace."""
    write_flights(tidegate.settings.home, 1, ROW)
    collecting.hangs.set()
    done = tidegate.apart("run", "flights", "--json", **collecting.environment(), OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["committed"] == [1]
    assert collecting.spans() == []


def test_nothing_is_sent_unless_it_is_asked_for(tidegate: CommandLine, collecting: Collector) -> None:
    """The standard variables switch it off too."""
    write_flights(tidegate.settings.home, 1, ROW)
    done = tidegate("run", "flights", **{**collecting.environment(), "OTEL_TRACES_EXPORTER": "none"})
    assert done.returncode == 0, done.stderr
    assert collecting.spans() == []


def test_the_log_as_json_names_the_batch_of_each_line(tidegate: CommandLine) -> None:
    """With pipeline, txid and attempt as fields, whatever a file is called."""
    write_flights(tidegate.settings.home, 1, ROW)
    done = tidegate("run", "flights", "--log-json", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    ours = {line["event"]: line for line in lines if line["logger"].startswith("tidegate.jobs.")}
    (sealed,) = (line for event, line in ours.items() if "sealed" in event)
    (committed,) = (line for event, line in ours.items() if " committed, " in event)
    for line in (sealed, committed):
        assert (line["pipeline"], line["txid"], line["attempt"], line["level"]) == ("flights", 1, 1, "info")
