"""Metrics, alerts and mails of real runs: each batch is sent once, and a poisoned batch calls somebody."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.end_to_end.conftest import Project, running_project, wait_for
from tests.end_to_end.listeners import Mailbox, Received, mailbox, metrics_collector

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "tidegate" / "observability"
TASKS_MAIL = 'SmtpNotifier(from_email="a@example.org", to="b@example.org", subject="{{ ti.task_id }} failed", html_content="x")'
pytestmark = pytest.mark.soak


@dataclass
class Observed:
    """A project, and what listens to it."""

    project: Project
    mailbox: Mailbox
    received: Received


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """A whole stack that sends mails and metrics; its Dag is that of docs/alerts.md, with a mail for each task besides."""
    dags = tmp_path_factory.mktemp("dags")
    (documented,) = re.findall(r"```python\n# dags/orders.py\n(.*?)```", (REPOSITORY / "docs/alerts.md").read_text(), re.DOTALL)
    last = 'dag = batch_dag("orders", schedule="@hourly", on_failure_callback=mail)\n'
    assert last in documented
    ours = f'dag = batch_dag("flights", on_failure_callback=mail, default_args={{"on_failure_callback": {TASKS_MAIL}}})\n'
    (dags / "flights.py").write_text(documented.replace(last, ours))
    with mailbox() as mails, metrics_collector() as received:
        variables = {
            "AIRFLOW_CONN_SMTP_DEFAULT": f"smtp://127.0.0.1:{mails.port}?disable_ssl=true&disable_tls=true",
            "AIRFLOW__METRICS__OTEL_ON": "True",
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"http://127.0.0.1:{received.port}/v1/metrics",
            "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
        }
        folders = [tmp_path_factory.mktemp(name) for name in ("project", "reservoir")]
        with running_project(*folders, dags, **variables) as project:
            yield Observed(project, mails, received)


def test_tasks_send_metrics_by_airflows_own_settings(observed: Observed) -> None:
    """Each batch is sent once, with its times and rows, although one task commits for others."""
    txids = observed.project.next_flights(2)
    assert observed.project.json("trigger", "flights", "--wait")["committed"] == txids

    rows = sum(batch["source_rows"] for batch in observed.project.json("inspect", "flights"))
    expected = {
        **dict.fromkeys(("batch.processed", "batch.committed", "phase.process", "phase.seal"), 2),
        **dict.fromkeys(("phase.wait", "phase.commit", "latency"), 2),
        "rows": rows,
    }
    expected = {f"airflow.tidegate.{name}": value for name, value in expected.items()}

    def ours() -> dict[str, float]:
        return {name: value for name, value in observed.received.sums("flights").items() if ".tidegate." in name}

    wait_for(lambda: ours() == expected, "metrics of both batches", every=0.5)
    assert rows > 0


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


def answer(http: httpx.Client, path: str, **parameters: str) -> Any:
    """Return what Prometheus answers; None while it does not."""
    try:
        found = http.get(path, params=parameters)
    except httpx.TransportError:
        return None
    return found.json()["data"] if found.status_code == 200 else None


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is missing; install Debian's package of this name")
def test_a_poisoned_batch_calls_somebody(observed: Observed, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """Prometheus' alert fires and names pipeline and code; Airflow sends a mail for the run and one for the task."""
    project, mails = observed.project, observed.mailbox.mails

    def firing() -> list[dict[str, str]]:
        alerts = (answer(http, "/alerts") or {"alerts": []})["alerts"]
        return [alert["labels"] for alert in alerts if alert["state"] == "firing"]

    with prometheus(project, tmp_path, free_port()) as http:
        wait_for(lambda: (answer(http, "/query", query="tidegate_up") or {}).get("result"), "the first scrape")
        assert firing() == []
        mails.clear()
        (folder := project.home / "data" / "flights").mkdir(parents=True, exist_ok=True)
        (folder / "2099-01-01.csv").write_text("year,month,day\n2099,1,soon\n")
        project.json("trigger", "flights", "--wait", exit_code=1)

        wait_for(firing, "an alert")
        assert [(a["alertname"], a["pipeline"], a["code"]) for a in firing()] == [
            ("TidegateBatchHalted", "flights", "MALFORMED_RECORD")
        ]
        wait_for(lambda: len(mails) >= 2, "two mails")
        subjects = {str(mail["Subject"]) for mail in mails}
        assert {"flights has failed", "batch.process failed"} <= subjects
        (of_run,) = [mail for mail in mails if mail["Subject"] == "flights has failed"]
        assert "tidegate why flights" in "".join(part.get_content() for part in of_run.walk() if not part.is_multipart())
        wait_for(lambda: "airflow.tidegate.batch.failed" in observed.received.sums("flights"), "the failure's metric")

        ((txid,),) = project.ask("SELECT max(txid) FROM tidegate.batch WHERE pipeline = 'flights'")
        project.tidegate("skip", "flights", str(txid), "--reason", "a test", "--yes")
        wait_for(lambda: "TidegateBatchHalted" not in {alert["alertname"] for alert in firing()}, "the end of the alert")
        wait_for(lambda: "TidegateBatchSkipped" in {alert["alertname"] for alert in firing()}, "the alert about the skip")
