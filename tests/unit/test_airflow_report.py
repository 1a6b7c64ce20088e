"""What Airflow's facts mean for a pipeline that waits, and what is not Airflow; tests/end_to_end asks a real Airflow."""

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tidegate.airflow_client import AirflowClient
from tidegate.explain.airflow_report import BUSY_SECONDS, Facts, causes, causes_of
from tidegate.stack.components.airflow import USERS_VARIABLE, EmbeddedAirflow
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import PermanentError

FACTS = Facts({"dag_run_id": "manual__1", "state": "running"}, None, None, 1.0, "healthy", {}, 3, 2000)
PAGE = "http://127.0.0.1:8080/dags/orders"


def pool(slots: int, open_slots: int = 0, *, include_deferred: bool = False) -> dict[str, Any]:
    return {"pools": {"small": {"slots": slots, "open_slots": open_slots, "include_deferred": include_deferred}}}


@pytest.mark.parametrize(
    ("facts", "codes", "fragment"),
    [
        ({}, "RUN_ACTIVE", "Airflow's run manual__1 of orders is running"),
        ({"scheduler_silent_seconds": BUSY_SECONDS + 5.0}, "RUN_ACTIVE SCHEDULER_SLOW", "last been heard 25 s ago"),
        ({"scheduler_silent_seconds": None}, "RUN_ACTIVE SCHEDULER_SLOW", "has not been heard"),
        ({"triggerer": "unhealthy"}, "RUN_ACTIVE TRIGGERER_AWAY", "triggerer is unhealthy"),
        ({"triggerer": None}, "RUN_ACTIVE TRIGGERER_AWAY", "triggerer is not there"),
        ({"capacity": 2}, "RUN_ACTIVE TRIGGERER_FULL", "3 tasks wait in Airflow's triggerer, which has room for 2"),
        ({"pools": {"mine": None}}, "RUN_ACTIVE POOL_MISSING", "Airflow has no pool mine, in which tasks of this run are"),
        (pool(1), "RUN_ACTIVE POOL_FULL", "No slot of Airflow's pool small is free: all 1 are taken"),
        (pool(0), "RUN_ACTIVE POOL_FULL", "Airflow's pool small has no slots"),
        (pool(4, -2, include_deferred=True), "RUN_ACTIVE POOL_FULL", "Tasks that wait in the triggerer take slots of it"),
        (pool(4, 1), "RUN_ACTIVE", "Airflow's run manual__1 of orders is running"),
        (pool(-1, -1), "RUN_ACTIVE", "Airflow's run manual__1 of orders is running"),
        ({"paused_page": PAGE}, "DAG_PAUSED", "its run manual__1 starts no task"),
        ({"paused_page": PAGE, "run": None}, "DAG_PAUSED", "so no run of it begins"),
    ],
)
def test_each_obstacle_is_named_and_a_run_that_goes_on(facts: dict[str, Any], codes: str, fragment: str) -> None:
    found = list(causes_of("orders", replace(FACTS, **facts), None))
    assert [cause.code for cause in found] == codes.split()
    assert fragment in found[-1].sentence
    assert all(cause.advice for cause in found)
    assert "paused_page" not in facts or found[0].advice == f"Unpause it in Airflow: {PAGE}"


@contextmanager
def answering(*answers: tuple[int, str]) -> Iterator[int]:
    """Give requests these answers in turn, over and over."""
    next_answers = itertools.cycle(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body = next(next_answers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET  # noqa: N815 - as the base class calls it

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def settings_for(port: int | str, folder: Path) -> Settings:
    (folder / "password").write_text("secret")
    return Settings(airflow_url=f"http://127.0.0.1:{port}", airflow_password_file=folder / "password")


FOREIGN = [(302, ""), (200, "<html>Log in</html>"), (200, '{"status": "ok"}'), (200, "[]"), (200, "[" * 9_999)]


@pytest.mark.parametrize("answer", FOREIGN)
def test_another_program_in_airflows_place_is_named_and_ends_nothing(tmp_path: Path, answer: tuple[int, str]) -> None:
    with answering(answer) as port:
        (unknown,) = causes(settings_for(port, tmp_path), "orders", None)
        assert EmbeddedAirflow(tmp_path, {"airflow": port}, Mock(port=1)).silent() == set()
    assert (unknown.code, "is not Airflow" in unknown.sentence) == ("AIRFLOW_UNKNOWN", True)
    (unknown,) = causes(settings_for("[", tmp_path), "orders", None)
    assert "is no address" in unknown.sentence


def test_a_client_logs_in_again_and_starts_no_dag_without_a_plan(tmp_path: Path) -> None:
    login = (200, '{"access_token": "t"}')
    with answering(login, (401, ""), login, (200, '{"state": "queued"}')) as port:
        assert AirflowClient(settings_for(port, tmp_path)).run_state("orders", "run") == "queued"
    with answering(login, (401, "")) as port, pytest.raises(PermanentError, match="refuses the user or password"):
        AirflowClient(settings_for(port, tmp_path)).run_state("orders", "run")
    with answering(login, (200, '{"is_paused": false}'), (200, '{"tasks": [{"task_id": "extract"}]}')) as port:
        client = AirflowClient(settings_for(port, tmp_path))
        with pytest.raises(PermanentError, match="not Tidegate's: it has no task plan"):
            client.trigger("orders", {})


def test_each_of_airflows_users_gets_a_password_from_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USERS_VARIABLE, "admin:admin, anna:viewer")  # Airflow strips each, and prints a password that it makes
    EmbeddedAirflow(tmp_path, {"airflow": 1}, Mock(port=1)).initialize()
    assert json.loads((tmp_path / "secrets/airflow_passwords.json").read_text()).keys() == {"admin", "anna"}
