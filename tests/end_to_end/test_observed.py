"""What a real run, one of whose tasks is killed, reports to the outside: traces, logs and lineage."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openlineage.client import event_v2, facet_v2
from openlineage.client.generated import base as generated

from tests.collector import Collector, Span, collector, real_collector
from tests.end_to_end.conftest import SEES_CONNECTIONS_OF_TASKS, Project, running_project, wait_for
from tests.examples import EXAMPLES
from tidegate.dags.batch_trigger import COMMIT, PROCESS
from tidegate.dags.lineage import TidegateBatchRunFacet

SCHEMA = Path(__file__).resolve().parents[2] / "docs/schemas/TidegateBatchRunFacet.json"
TXIDS = range(1, 7)
OURS = ("plan", "process", "stage", "seal", "wait", "commit")
pytestmark = [SEES_CONNECTIONS_OF_TASKS, pytest.mark.soak]


@dataclass
class Observed:
    """A project, what it has reported, and its runs: of four txids, then of two, one of which has two attempts."""

    project: Project
    collector: Collector
    lineage: Path
    run_ids: list[str]

    def attempts(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Return the ledger's attempts by txid and number."""
        batches = [self.project.json("inspect", "flights", "--txid", str(txid)) for txid in TXIDS]
        return {(b["status"]["txid"], a["attempt"]): a for b in batches for a in b["attempts"]}

    def spans(self, name: str) -> dict[tuple[int, int], Span]:
        """Return the spans of a name by txid and attempt; each is recorded once."""
        found = [span for span in self.collector.spans() if span.name == name]
        assert len({span.attempt for span in found}) == len(found)
        return {span.attempt: span for span in found}

    def events(self) -> list[dict[str, Any]]:
        """Return the OpenLineage events so far."""
        return [json.loads(line) for line in self.lineage.read_text().splitlines()]

    def log_lines(self) -> list[dict[str, Any]]:
        """Return all lines of the logs of the pipeline's tasks."""
        folder = self.project.home / ".tidegate/airflow/logs/dag_id=flights"
        return [json.loads(line) for file in sorted(folder.rglob("*.log")) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[Observed]:
    """A stack that reports all, after two runs; in the second, a task was killed just before the seal.

    The variable OTELCOL may name a collector of the OpenTelemetry project, which then takes the traces.
    """
    folder = tmp_path_factory.mktemp("reported")
    with ExitStack() as stack:
        traces, program = folder / "traces.jsonl", os.environ.get("OTELCOL")
        receiver = stack.enter_context(real_collector(program, free_port(), traces) if program else collector(traces))
        environment = {
            **receiver.environment(),
            "OTEL_SERVICE_NAME": "airflow-of-tests",
            "AIRFLOW__TRACES__OTEL_ON": "True",
            "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(
                {"type": "file", "log_file_path": str(folder / "lineage.jsonl"), "append": True}
            ),
            "AIRFLOW__OPENLINEAGE__NAMESPACE": "tests",
        }
        home, reservoir = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("reservoir")
        project = stack.enter_context(running_project(home, reservoir, EXAMPLES / "dags", **environment))
        project.add_files("flights", 60)
        first = project.json("trigger", "flights", "--wait")
        assert first["committed"] == [1, 2, 3, 4]
        project.next_flights(2)
        run = project.start("trigger", "flights", "--wait")
        with project.held("seal") as held:
            held.kill_waiting_process("INSERT INTO tidegate.seal")
        out, err = run.communicate(timeout=400)
        assert run.returncode == 0, err
        second = json.loads(out)
        assert second["committed"] == [5, 6]
        yield Observed(project, receiver, folder / "lineage.jsonl", [first["run_id"], second["run_id"]])


def test_every_attempt_has_its_spans(observed: Observed) -> None:
    """The killed one too: what it did is recorded by the task that took over."""
    attempts = observed.attempts()
    sealed = {key for key, attempt in attempts.items() if attempt["sealed_at"]}
    fenced = attempts.keys() - sealed
    assert (len(sealed), len(fenced)) == (6, 1)
    committed = wait_for(lambda: len(found := observed.spans("commit")) == 6 and found, "the spans of all commits")

    process = observed.spans("process")
    assert process.keys() == attempts.keys()
    assert {key: span.error for key, span in process.items() if span.error} == dict.fromkeys(fenced, "ATTEMPT_FENCED")
    for name in ("stage", "seal", "wait", "commit"):
        assert observed.spans(name).keys() == sealed, name
    assert {span.attributes["tidegate.skipped"] for span in committed.values()} == {False}


def test_the_spans_are_children_of_airflows_and_lie_within_each_other(observed: Observed) -> None:
    """One trace per run: a task's span, then what it did; a wait ends where the commit begins."""

    def runs() -> dict[str, Span]:
        return {span.trace_id: span for span in observed.collector.spans() if span.name == "dag_run.flights"}

    run_of = wait_for(lambda: len(found := runs()) == 2 and found, "the spans of the runs")
    spans = {span.span_id: span for span in observed.collector.spans()}
    ours = [span for span in spans.values() if span.name in OURS]
    assert {span.trace_id for span in ours} == run_of.keys()
    assert {span.service for span in ours} == {"airflow-of-tests"}

    for plan in (span for span in ours if span.name == "plan"):
        assert spans[plan.parent_id].name == "worker.plan"
        assert spans[plan.parent_id].contains(plan)
    stage, seal, wait, commit = (observed.spans(name) for name in ("stage", "seal", "wait", "commit"))
    for key, process in observed.spans("process").items():
        task, run = spans[process.parent_id], run_of[process.trace_id]
        assert task.name.startswith(f"worker.{PROCESS}[")
        assert spans[task.parent_id].name.startswith(f"task_run.{PROCESS}[")
        assert spans[task.parent_id].parent_id == run.span_id
        if process.error:
            continue  # it ran in a task that was killed, whose span Airflow cannot tell
        assert task.contains(process)
        for part in (stage[key], seal[key]):
            assert part.parent_id == process.span_id
            assert process.contains(part)
        assert process.end == seal[key].end == wait[key].begin
        assert wait[key].end == commit[key].begin
        assert run.contains(wait[key])
        assert run.contains(commit[key])
        told_by, index = spans[commit[key].parent_id], (key[0] - 1) % 4
        assert wait[key].parent_id == commit[key].parent_id
        assert f"/{COMMIT}/{index}/" in told_by.name or told_by.name == f"worker.{COMMIT}[{index}]"


def test_log_lines_name_the_batch_as_fields(observed: Observed) -> None:
    """In the logs of Airflow's tasks, for programs that search them; of the triggerer's waits too."""
    lines = [line for line in observed.log_lines() if line.get("logger", "").startswith(("tidegate.jobs.", "tidegate.dags."))]
    sealed = [line for line in lines if " sealed: " in line["event"]]
    attempts = {key for key, attempt in observed.attempts().items() if attempt["sealed_at"]}

    assert {(line["pipeline"], line["txid"], line["attempt"]) for line in sealed} == {("flights", *key) for key in attempts}
    assert [line for line in lines if "pipeline" not in line] == []
    about_batches = [line for line in lines if line["event"].startswith("flights ")]
    assert len(about_batches) > len(sealed)
    wrong = []
    for line in about_batches:
        named = line["event"].split()[1].rstrip(":").split(":")
        if [str(line.get(name)) for name in ("txid", "attempt")][: len(named)] != named:
            wrong.append(line)
    assert wrong == []


def test_lineage_names_files_and_states_of_each_batch(observed: Observed) -> None:
    """In events that keep to the spec; each process task reports its own batch, whichever task did the work."""

    def complete() -> dict[int, dict[str, Any]]:
        done = [e for e in observed.events() if e["eventType"] == "COMPLETE" and e["job"]["name"] == f"flights.{PROCESS}"]
        return {event["run"]["facets"]["tidegate_batch"]["txid"]: event for event in done}

    events = wait_for(lambda: len(found := complete()) == 6 and found, "the events of all batches")
    settings = observed.project.settings
    server = f"postgres://{settings.pg_host}:{settings.pg_port}"
    for txid in TXIDS:
        event = events[txid]
        facet = event["run"]["facets"]["tidegate_batch"]
        assert (facet["pipeline"], facet["phase"]) in {("flights", "processed"), ("flights", "committed")}
        assert (txid, facet["attempt"]) in observed.attempts()
        (read,), (written,) = event["inputs"], event["outputs"]
        assert (read["namespace"], read["name"]) == ("file", str(observed.project.home / "data/flights"))
        planned = observed.project.json("inspect", "flights", "--txid", str(txid))["source_metadata"]["files"]
        locations = read["inputFacets"]["subset"]["inputCondition"]["locations"]
        assert locations == [str(observed.project.home / "data/flights" / file["name"]) for file in planned]
        assert (written["namespace"], written["name"]) == (server, "tidegate.state.daily")
        assert "carrier" in {column["name"] for column in written["facets"]["schema"]["fields"]}


def test_every_event_of_lineage_keeps_to_the_spec(observed: Observed) -> None:
    """Each part is made again by the class that is generated from the spec's schema, which refuses what it does not know."""
    ours_or_generated = (
        "tidegate.dags.",
        "openlineage.client.generated.",
    )  # not Airflow's own, which share the URL of their base
    known = [cls for cls in _all_subclasses(generated.BaseFacet) if cls.__module__.startswith(ours_or_generated)]
    classes = {cls._get_schema(): cls for cls in known if cls.__module__ != generated.__name__}
    schema = json.loads(SCHEMA.read_text())
    assert schema["$id"] == TidegateBatchRunFacet._get_schema()

    seen = set()
    for event in observed.events():
        assert event_v2.RunEvent._get_schema() == event["schemaURL"]
        facets = [*event["run"]["facets"].values(), *event["job"]["facets"].values()]
        for dataset in [*event["inputs"], *event["outputs"]]:
            assert dataset.keys() <= {"namespace", "name", "facets", "inputFacets", "outputFacets"}
            facets += [f for kind in ("facets", "inputFacets", "outputFacets") for f in dataset.get(kind, {}).values()]
        for facet in facets:
            cls = classes.get(facet["_schemaURL"])
            if cls is None:  # Airflow's own, whose schema is that of any facet
                assert facet["_schemaURL"].startswith(("https://openlineage.io/spec/", "https://raw.githubusercontent.com/"))
                continue
            given = {name: value for name, value in facet.items() if name not in ("_schemaURL", "_producer")}
            cls(**given)
            seen.add(cls.__name__)
            if cls is TidegateBatchRunFacet:
                jsonschema.validate(facet, schema, format_checker=jsonschema.FormatChecker())
        event_v2.RunEvent(
            eventTime=event["eventTime"],
            producer=event["producer"],
            run=event_v2.Run(event["run"]["runId"]),
            job=event_v2.Job(event["job"]["namespace"], event["job"]["name"]),
            eventType=event_v2.RunState(event["eventType"]),
        )
    assert seen >= {"TidegateBatchRunFacet", "InputSubsetInputDatasetFacet", "SchemaDatasetFacet", "ParentRunFacet"}
    assert facet_v2.RunFacet in TidegateBatchRunFacet.__mro__


def test_a_collector_that_hangs_fails_no_task(observed: Observed) -> None:
    """It takes what it is sent and never answers; the run is green in the first try of each task, and its spans are lost."""
    if os.environ.get("OTELCOL"):
        pytest.skip("only the tests' own collector can be made to hang: unset OTELCOL")
    (txid,) = observed.project.next_flights(1)
    observed.collector.hangs.set()

    run = observed.project.json("trigger", "flights", "--wait")

    assert (run["state"], run["committed"]) == ("success", [txid])
    tasks = observed.project.airflow().task_instances("flights", run["run_id"])
    assert {task["try_number"] for task in tasks if task["task_id"] != COMMIT} == {1}
    assert [span for span in observed.collector.spans() if span.attempt[0] == txid] == []


def _all_subclasses(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _all_subclasses(sub)
