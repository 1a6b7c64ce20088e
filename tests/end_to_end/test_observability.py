"""Metrics, alerts and mails of real runs: they agree with the ledger while tasks die, and a poisoned batch calls somebody."""

import json
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg2
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.end_to_end.conftest import SEES_CONNECTIONS_OF_TASKS, Project, running_project, wait_for
from tests.end_to_end.listeners import Mailbox, Received, mailbox, metrics_collector

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "tidegate" / "observability"
TASKS_MAIL = 'SmtpNotifier(from_email="a@example.org", to="b@example.org", subject="{{ ti.task_id }} failed", html_content="x")'
FACTS = """
SELECT (SELECT txid FROM tidegate.cursor WHERE pipeline = 'flights'),
       (SELECT coalesce(max(txid), 0) FROM tidegate.batch WHERE pipeline = 'flights'),
       (SELECT count(*) FROM tidegate.quarantine WHERE pipeline = 'flights' AND replayed_txid IS NULL),
       (SELECT coalesce(sum(a.source_rows), 0)::bigint FROM tidegate.commit c
          JOIN tidegate.attempt a USING (pipeline, txid, attempt) WHERE c.pipeline = 'flights' AND c.skipped_reason IS NULL),
       (SELECT coalesce(max(b.attempt), 0) FROM tidegate.batch b JOIN tidegate.cursor k USING (pipeline)
          WHERE pipeline = 'flights' AND b.txid > k.txid)
"""
PHASES = """
SELECT b.phase, count(*) FROM tidegate.batches b JOIN tidegate.cursor k USING (pipeline)
WHERE pipeline = 'flights' AND b.txid > k.txid GROUP BY 1
"""
OUTCOMES = """
SELECT CASE WHEN sealed_at IS NOT NULL THEN 'processed' WHEN error LIKE 'ATTEMPT_FENCED:%' THEN 'fenced' ELSE 'failed' END,
       count(*)
FROM tidegate.attempt WHERE pipeline = 'flights' AND (sealed_at IS NOT NULL OR failed_at IS NOT NULL) GROUP BY 1
"""
Facts = dict[str, Any]
MONOTONE = ("committed", "opened")
pytestmark = pytest.mark.soak


@dataclass
class Observed:
    """A project, and what listens to it."""

    project: Project
    mailbox: Mailbox
    received: Received
    http: httpx.Client

    def scrape(self) -> list[Any]:
        """Scrape as Prometheus does."""
        token = self.project.settings.metrics_token_file.read_text()
        answer = self.http.get("/tidegate/metrics", headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 200, answer.text
        return [s for f in parse(answer.text) for s in f.samples if s.labels.get("pipeline") == "flights"]

    def metrics(self) -> Facts:
        """Return the facts that the metrics show of flights."""
        samples = self.scrape()
        one = {s.name: int(s.value) for s in samples if set(s.labels) == {"pipeline"}}

        def by(name: str, label: str) -> dict[str, int]:
            return {s.labels[label]: int(s.value) for s in samples if s.name == name and s.value}

        return {
            "committed": one["tidegate_committed_txid"],
            "opened": one["tidegate_opened_txid"],
            "quarantined": one["tidegate_quarantine_records"],
            "tries": one["tidegate_tries"],
            "phases": by("tidegate_batches", "phase"),
        }

    def page(self) -> Facts:
        """Return the facts that the page tells."""
        answer = self.http.get("/tidegate/api/pipelines/flights")
        assert answer.status_code == 200, answer.text
        row = answer.json()
        phases = {phase: count for phase, count in row["phases"].items() if count}
        return {name: row[name] for name in ("committed", "opened", "quarantined")} | {"phases": phases}

    def status(self) -> Facts:
        """Return the facts that `tidegate status` tells."""
        (row,) = [row for row in self.project.json("status")["pipelines"] if row["pipeline"] == "flights"]
        assert row["pending"] == row["opened"] - row["committed"]
        return {name: row[name] for name in ("committed", "opened", "quarantined")}

    def ledger(self) -> Facts:
        """Return the same by SQL, of one moment."""
        with closing(psycopg2.connect(**self.project.settings.conninfo(user="tidegate_reader"))) as connection:
            connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
            with connection.cursor() as cursor:
                cursor.execute(FACTS)
                committed, opened, quarantined, rows, tries = cursor.fetchone()
                cursor.execute(PHASES)
                phases = dict(cursor.fetchall())
                cursor.execute(OUTCOMES)
                outcomes = dict(cursor.fetchall())
        return {
            "committed": committed,
            "opened": opened,
            "quarantined": quarantined,
            "rows": rows,
            "tries": tries,
            "phases": phases,
            "outcomes": outcomes,
        }


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
        with (
            running_project(*folders, dags, **variables) as project,
            httpx.Client(base_url=project.settings.airflow_url, timeout=60) as http,
        ):
            login = {"username": "admin", "password": project.settings.airflow_password_file.read_text()}
            http.cookies.set("_token", http.post("/auth/token", json=login).json()["access_token"])
            yield Observed(project, mails, received, http)


def test_tasks_send_metrics_by_airflows_own_settings(observed: Observed) -> None:
    """Each batch is sent once, with its times and rows, although one task commits for others."""
    txids = observed.project.next_flights(2)
    assert observed.project.json("trigger", "flights", "--wait")["committed"] == txids

    rows = observed.ledger()["rows"]
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
def compared(observed: Observed, report: Callable[[], Facts]) -> Iterator[Counter[str]]:
    """Compare what is reported with the ledger all the time; yield how often it was equal, or between two moments."""
    seen: Counter[str] = Counter()
    failures: list[BaseException] = []
    over = threading.Event()

    def compare() -> None:
        try:
            while not over.is_set():
                before, reported, after = observed.ledger(), report(), observed.ledger()
                if before == after:
                    assert reported == {name: before[name] for name in reported}
                    seen["equal", before["committed"]] += 1
                for name in [name for name in MONOTONE if name in reported]:
                    assert before[name] <= reported[name] <= after[name], name
                seen["between"] += 1
                time.sleep(0.05)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            failures.append(error)

    thread = threading.Thread(target=compare)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
    if failures:
        raise failures[0]


@SEES_CONNECTIONS_OF_TASKS
def test_metrics_page_status_and_sql_agree_while_tasks_are_killed(observed: Observed) -> None:
    """One task dies in its seal, another in its commit: at every moment all four say the same."""
    project = observed.project
    txids = project.next_flights(4)
    with (
        compared(observed, observed.metrics) as of_metrics,
        compared(observed, observed.page) as of_page,
        compared(observed, observed.status) as of_status,
    ):
        run = project.start("trigger", "flights", "--wait")
        with project.held("seal") as held:
            held.kill_waiting_process("INSERT INTO tidegate.seal")
        with project.held("commit") as held:
            held.kill_waiting_process("INSERT INTO tidegate.commit")
        out, err = run.communicate(timeout=300)

        assert run.returncode == 0, err
        assert json.loads(out)["committed"] == txids
        for seen in (of_metrics, of_page, of_status):
            wait_for(lambda seen=seen: seen["equal", txids[-1]] > 0, "a comparison after the run")
    for seen in (of_metrics, of_page):
        assert {key[1] for key in seen if key[0] == "equal"} >= {txids[0] - 1, txids[-1]}
    found = observed.ledger()
    assert found["outcomes"]["fenced"] >= 1
    assert found["rows"] == sum(row["flights"] for row in project.flights())


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

        txid = observed.ledger()["opened"]
        project.tidegate("skip", "flights", str(txid), "--reason", "a test", "--yes")
        wait_for(lambda: "TidegateBatchHalted" not in {alert["alertname"] for alert in firing()}, "the end of the alert")
        wait_for(lambda: "TidegateBatchSkipped" in {alert["alertname"] for alert in firing()}, "the alert about the skip")
