"""What a real Airflow reports to the outside, also of a killed task: metrics, traces, logs, lineage, alerts and mails."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml
from openlineage.client import event_v2, facet_v2
from openlineage.client.generated import base as generated

from tests.end_to_end.conftest import SEES_CONNECTIONS_OF_TASKS, Project, running_project, wait_for, waiting_process
from tests.end_to_end.listeners import Collector, Mailbox, Span, collector, mailbox
from tidegate.dags.batch_trigger import COMMIT, PROCESS
from tidegate.dags.lineage import TidegateBatchRunFacet

REPOSITORY = Path(__file__).resolve().parents[2]
SCHEMA = REPOSITORY / "docs/schemas/TidegateBatchRunFacet.json"
SHIPPED = REPOSITORY / "tidegate/observability"
TASKS_MAIL = 'SmtpNotifier(from_email="a@example.org", to="b@example.org", subject="{{ ti.task_id }} failed", html_content="x")'
FIRST, TXIDS = [1, 2, 3, 4], range(1, 7)
OURS = ("plan", "process", "stage", "seal", "wait", "commit")
pytestmark = [SEES_CONNECTIONS_OF_TASKS, pytest.mark.soak]


@dataclass
class Observed:
    """A project, and what listens to it."""

    project: Project
    mailbox: Mailbox
    collector: Collector
    lineage: Path

    def attempts(self) -> dict[tuple[int, int], dict[str, Any]]:
        batches = [self.project.json("inspect", "flights", "--txid", str(txid)) for txid in TXIDS]
        return {(b["status"]["txid"], a["attempt"]): a for b in batches for a in b["attempts"]}

    def spans(self, name: str) -> dict[tuple[int, int], Span]:
        """Return the spans of a name by txid and attempt; each is recorded once."""
        found = [span for span in self.collector.spans if span.name == name]
        assert len({span.attempt for span in found}) == len(found)
        return {span.attempt: span for span in found}

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lineage.read_text().splitlines()]

    def log_lines(self) -> list[dict[str, Any]]:
        folder = self.project.home / ".tidegate/airflow/logs/dag_id=flights"
        return [json.loads(line) for file in sorted(folder.rglob("*.log")) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """A whole stack that reports all; its Dag is that of docs/alerts.md, with a mail for each task besides."""
    home, reservoir, dags = (tmp_path_factory.mktemp(name) for name in ("project", "reservoir", "dags"))
    (documented,) = re.findall(r"```python\n# dags/orders.py\n(.*?)```", (REPOSITORY / "docs/alerts.md").read_text(), re.DOTALL)
    last = 'dag = batch_dag("orders", schedule="@hourly", on_failure_callback=mail)\n'
    assert last in documented
    ours = f'dag = batch_dag("flights", on_failure_callback=mail, default_args={{"on_failure_callback": {TASKS_MAIL}}})\n'
    (dags / "flights.py").write_text(documented.replace(last, ours))
    lineage = dags.with_name("lineage.jsonl")
    with mailbox() as mails, collector() as received:
        variables = {
            "AIRFLOW_CONN_SMTP_DEFAULT": f"smtp://127.0.0.1:{mails.port}?disable_ssl=true&disable_tls=true",
            "AIRFLOW__METRICS__OTEL_ON": "True",
            "AIRFLOW__TRACES__OTEL_ON": "True",
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"http://127.0.0.1:{received.port}/v1/metrics",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{received.port}/v1/traces",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_TRACES_EXPORTER": "otlp_proto_http",
            "OTEL_SERVICE_NAME": "airflow-of-tests",
            "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps({"type": "file", "log_file_path": str(lineage), "append": True}),
            "AIRFLOW__OPENLINEAGE__NAMESPACE": "tests",
        }
        with running_project(home, reservoir, dags, **variables) as project:
            project.add_files("flights", 60)
            assert project.json("trigger", "flights", "--wait")["committed"] == FIRST
            yield Observed(project, mails, received, lineage)


def test_tasks_send_metrics_by_airflows_own_settings(stack: Observed) -> None:
    """Each batch is sent once, with its times and rows, although one task commits for others."""
    rows = sum(batch["source_rows"] for batch in stack.project.json("inspect", "flights"))
    sent_once = ("batch.processed", "batch.committed", "phase.process", "phase.seal", "phase.wait", "phase.commit", "latency")
    expected = {f"airflow.tidegate.{name}": len(FIRST) for name in sent_once} | {"airflow.tidegate.rows": rows}

    def ours() -> dict[str, float]:
        return {name: value for name, value in stack.collector.metrics("flights").items() if ".tidegate." in name}

    wait_for(lambda: ours() == expected, "metrics of all batches", every=0.5)
    assert rows > 0


@pytest.fixture(scope="module")
def observed(stack: Observed) -> Observed:
    """The stack after another run, of two txids, in which a task was killed just before the seal."""
    stack.project.next_flights(2)
    run = stack.project.start("trigger", "flights", "--wait")
    with stack.project.held("seal"):
        waiting_process(stack.project.settings, "INSERT INTO tidegate.seal").kill()
    out, err = run.communicate(timeout=400)
    assert run.returncode == 0, err
    assert json.loads(out)["committed"] == [5, 6]
    return stack


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
        return {span.trace_id: span for span in observed.collector.spans if span.name == "dag_run.flights"}

    run_of = wait_for(lambda: len(found := runs()) == 2 and found, "the spans of the runs")
    spans = {span.span_id: span for span in observed.collector.spans}
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
        told_by, index = spans[commit[key].parent_id], (key[0] - 1) % len(FIRST)
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
    for line in about_batches:
        named = line["event"].split()[1].rstrip(":").split(":")
        assert [str(line.get(name)) for name in ("txid", "attempt")][: len(named)] == named, line


def test_lineage_names_files_and_states_of_each_batch(observed: Observed) -> None:
    """In events that keep to the spec; each process task reports its own batch, whichever task did the work."""

    def complete() -> dict[int, dict[str, Any]]:
        done = [e for e in observed.events() if e["eventType"] == "COMPLETE" and e["job"]["name"] == f"flights.{PROCESS}"]
        return {event["run"]["facets"]["tidegate_batch"]["txid"]: event for event in done}

    events = wait_for(lambda: len(found := complete()) == 6 and found, "the events of all batches")
    settings, folder = observed.project.settings, observed.project.home / "data/flights"
    attempts = observed.attempts()
    for txid in TXIDS:
        event = events[txid]
        facet = event["run"]["facets"]["tidegate_batch"]
        assert (facet["pipeline"], facet["phase"]) in {("flights", "processed"), ("flights", "committed")}
        assert (txid, facet["attempt"]) in attempts
        (read,), (written,) = event["inputs"], event["outputs"]
        assert (read["namespace"], read["name"]) == ("file", str(folder))
        planned = observed.project.json("inspect", "flights", "--txid", str(txid))["source_metadata"]["files"]
        locations = read["inputFacets"]["subset"]["inputCondition"]["locations"]
        assert locations == [str(folder / file["name"]) for file in planned]
        server = f"postgres://{settings.pg_host}:{settings.pg_port}"
        assert (written["namespace"], written["name"]) == (server, "tidegate.state.daily")
        assert "carrier" in {column["name"] for column in written["facets"]["schema"]["fields"]}


def test_every_event_of_lineage_keeps_to_the_spec(observed: Observed) -> None:
    """Each part is made again by the class that is generated from the spec's schema, which refuses what it does not know."""
    of_spec = ("tidegate.dags.", "openlineage.client.generated.")  # not Airflow's own, which share the URL of their base
    known = [cls for cls in _all_subclasses(generated.BaseFacet) if cls.__module__.startswith(of_spec)]
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
            cls(**{name: value for name, value in facet.items() if name not in ("_schemaURL", "_producer")})
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


def _all_subclasses(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _all_subclasses(sub)


@contextmanager
def prometheus(project: Project, folder: Path, port: int) -> Iterator[httpx.Client]:
    """Run a real Prometheus with the shipped configuration and rules; only addresses and intervals are the test's."""
    settings = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = settings["scrape_configs"]
    job["authorization"]["credentials_file"] = str(project.settings.metrics_token_file)
    job["static_configs"] = [{"targets": [project.settings.airflow_url.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    shutil.copy(SHIPPED / "alerts.yml", folder)
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=10) as http:
            yield http
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is missing; install Debian's package of this name")
def test_a_poisoned_batch_calls_somebody(observed: Observed, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """Prometheus' alert fires and names pipeline and code; Airflow sends a mail for the run and one for the task."""
    project, mails = observed.project, observed.mailbox.mails

    def answer(path: str, **parameters: str) -> dict[str, Any]:
        try:
            found = http.get(path, params=parameters)
        except httpx.TransportError:  # it has just been started
            return {}
        return found.json()["data"] if found.status_code == 200 else {}

    def firing() -> list[tuple[str, ...]]:
        labels = [alert["labels"] for alert in answer("/alerts").get("alerts", ()) if alert["state"] == "firing"]
        return [(each["alertname"], each["pipeline"], each.get("code", "")) for each in labels]

    with prometheus(project, tmp_path, free_port()) as http:
        wait_for(lambda: answer("/query", query="tidegate_up").get("result"), "the first scrape")
        assert firing() == []
        mails.clear()
        (project.home / "data/flights/2099-01-01.csv").write_text("year,month,day\n2099,1,soon\n")
        project.json("trigger", "flights", "--wait", exit_code=1)

        wait_for(firing, "an alert")
        assert firing() == [("TidegateBatchHalted", "flights", "MALFORMED_RECORD")]
        wanted = {"flights has failed", "batch.process failed"}
        wait_for(lambda: wanted <= {str(mail["Subject"]) for mail in mails}, "mails for the run and for the task")
        (of_run,) = [mail for mail in mails if mail["Subject"] == "flights has failed"]
        assert "tidegate why flights" in "".join(part.get_content() for part in of_run.walk() if not part.is_multipart())
        wait_for(lambda: "airflow.tidegate.batch.failed" in observed.collector.metrics("flights"), "the failure's metric")

        project.tidegate("skip", "flights", str(project.committed("flights") + 1), "--reason", "a test", "--yes")
        wait_for(lambda: {name for name, *_ in firing()} == {"TidegateBatchSkipped"}, "the alert about the skip instead")


def test_a_collector_that_hangs_fails_no_task(observed: Observed) -> None:
    """It takes what it is sent and never answers; the run is green in the first try of each task, and its spans are lost."""
    (txid,) = observed.project.next_flights(1)
    observed.collector.hangs.set()

    run = observed.project.json("trigger", "flights", "--wait")

    assert (run["state"], run["committed"]) == ("success", [txid])
    tasks = observed.project.airflow().task_instances("flights", run["run_id"])
    assert {task["try_number"] for task in tasks if task["task_id"] != COMMIT} == {1}
    assert [span for span in observed.collector.spans if span.attempt[0] == txid] == []
