"""A client for Airflow's REST API: starts Dag runs and reads their state."""

import time
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

import httpx

from tidegate.jobs.spark.port_owner import Server, loopback_address, trusted_users
from tidegate.state_store.base.errors import PermanentError, RetryableError, SettingsInvalid, UnknownPipeline
from tidegate.state_store.base.settings import Settings

TIMEOUT_SECONDS = 30
DAG_APPEARS_SECONDS = 30
NO_LOGIN = "There is no password for Airflow. Set TIDEGATE_AIRFLOW_PASSWORD_FILE, or run: tidegate up"


class AirflowUnavailable(RetryableError):
    """Airflow's api-server does not answer."""


class AirflowClient:
    """A logged-in connection to Airflow's api-server."""

    PLAN = "plan"  # the first task of a run, skipped if there is nothing to do

    def __init__(self, settings: Settings) -> None:
        try:
            url = httpx.URL(settings.airflow_url)
        except httpx.InvalidURL as error:
            raise SettingsInvalid(
                f"airflow_url {settings.airflow_url} is no address: {error}. See: tidegate settings"
            ) from error
        loopback = loopback_address(url.host) if url.scheme == "http" else None
        self._server: Server | None = None
        if loopback:  # no name is looked up, and no proxy sees the password
            url = url.copy_with(host=loopback)
            self._server = Server(loopback, url.port or 80, "Airflow's password", trusted_users(settings))
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS, trust_env=loopback is None)
        if settings.airflow_password_file is None:
            raise SettingsInvalid(NO_LOGIN)
        try:
            self._password = settings.airflow_password_file.read_text().strip()
        except OSError as error:
            raise SettingsInvalid(f"{settings.airflow_password_file} cannot be read: {error.strerror}. {NO_LOGIN}") from error
        self._user = settings.airflow_user
        self._log_in()

    def _log_in(self) -> None:
        self._http.headers.pop("Authorization", None)
        answer = self._call("POST", "/auth/token", json={"username": self._user, "password": self._password})
        if "access_token" not in answer:
            raise self._is_another("/auth/token")
        self._http.headers["Authorization"] = f"Bearer {answer['access_token']}"

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def trigger(self, pipeline: str, parameters: dict[str, int]) -> str:
        """Start a Dag run with these parameters; return its run id.

        Raises: UnknownPipeline if Airflow has no such Dag, PermanentError if its file is broken, the Dag is paused, or
        has no plan; AirflowUnavailable.
        """
        if self._dag(pipeline)["is_paused"]:
            raise PermanentError(f"Dag {pipeline} is paused, so a run would never start. Unpause it: {self._page(pipeline)}")
        try:
            tasks = self._call("GET", f"/api/v2/dags/{pipeline}/tasks")["tasks"]
            if all(task["task_id"] != self.PLAN for task in tasks):
                raise PermanentError(
                    f"Dag {pipeline} in Airflow is not Tidegate's: it has no task {self.PLAN}. Rename it, or the pipeline: "
                    f"{self._page(pipeline)}"
                )
            answer = self._call("POST", f"/api/v2/dags/{pipeline}/dagRuns", json={"logical_date": None, "conf": parameters})
        except UnknownPipeline:
            self._check_file(pipeline)  # Airflow still shows the Dag of a file that it cannot read any more
            raise
        return str(answer["dag_run_id"])

    def run_state(self, pipeline: str, run_id: str) -> str:
        """Return the Dag run's state: queued, running, success or failed.

        Raises: PermanentError if the run was deleted, AirflowUnavailable.
        """
        if (run := self._run(pipeline, run_id)) is None:
            raise PermanentError(
                f"Airflow has no Dag run {run_id} of {pipeline} any more: it was deleted. What has committed stays; "
                f"another run takes up what is left over: tidegate trigger {pipeline} --wait"
            )
        return str(run["state"])

    def has_run(self, pipeline: str, run_id: str) -> bool:
        """Return whether Airflow has this Dag run.

        Raises: AirflowUnavailable.
        """
        return self._run(pipeline, run_id) is not None

    def _run(self, pipeline: str, run_id: str) -> dict[str, Any] | None:
        return self._found(f"/api/v2/dags/{pipeline}/dagRuns/{run_id}")

    def _found(self, path: str) -> dict[str, Any] | None:
        try:
            return self._call("GET", path)
        except UnknownPipeline:
            return None

    def task_instances(self, pipeline: str, run_id: str, state: str | None = None) -> list[dict[str, Any]]:
        """Return the task instances of a run, all or those in one state; at most 100."""
        path = f"/api/v2/dags/{pipeline}/dagRuns/{run_id}/taskInstances"
        return list(self._call("GET", path, params={"limit": 100, **({"state": state} if state else {})})["task_instances"])

    def facts(self, pipeline: str) -> dict[str, Any]:
        """Return what `tidegate.explain.airflow_report` asks: a Dag and its active run, Airflow's processes, room for tasks.

        Raises: AirflowUnavailable; UnknownPipeline if Airflow has no such Dag.
        """
        is_paused = self._call("GET", f"/api/v2/dags/{pipeline}")["is_paused"]
        path, failed_plan = f"/api/v2/dags/{pipeline}/dagRuns", None
        runs = self._call("GET", path, params={"state": ["running", "queued"], "order_by": "id", "limit": 1})["dag_runs"]
        newest = [] if runs else self._call("GET", path, params={"order_by": "-id", "limit": 1})["dag_runs"]
        for run in newest:
            failed = self.task_instances(pipeline, run["dag_run_id"], "failed")
            failed_plan = run if any(task["task_id"] == self.PLAN for task in failed) else None
        health = self._call("GET", "/api/v2/monitor/health")
        waiting = {"state": "deferred", "limit": 1}
        deferred = self._call("GET", "/api/v2/dags/~/dagRuns/~/taskInstances", params=waiting)["total_entries"]
        scheduled = self.task_instances(pipeline, runs[0]["dag_run_id"], "scheduled") if runs else []
        heartbeat = health["scheduler"]["latest_scheduler_heartbeat"]
        silence = None if heartbeat is None else datetime.now(UTC) - datetime.fromisoformat(heartbeat)
        return {
            "run": runs[0] if runs else None,
            "failed_plan": failed_plan,
            "paused_page": self._page(pipeline) if is_paused else None,
            "scheduler_silent_seconds": None if silence is None else silence.total_seconds(),
            "triggerer": health["triggerer"]["status"],
            "pools": {name: self._found(f"/api/v2/pools/{quote(name)}") for name in {task["pool"] for task in scheduled}},
            "deferred": deferred,
        }

    def _page(self, pipeline: str) -> str:
        return f"{self._http.base_url}/dags/{pipeline}"

    def _dag(self, pipeline: str) -> dict[str, Any]:
        """Return the Dag, after waiting a while if Airflow has not read its file yet."""
        deadline = time.monotonic() + DAG_APPEARS_SECONDS
        while True:
            try:
                return self._call("GET", f"/api/v2/dags/{pipeline}")
            except UnknownPipeline:
                self._check_file(pipeline)
                if time.monotonic() > deadline:
                    raise
            time.sleep(1)

    def _check_file(self, pipeline: str) -> None:
        errors = self._call("GET", "/api/v2/importErrors", params={"filename_pattern": f"%{pipeline}.py"})["import_errors"]
        for broken in errors:
            if PurePath(broken["filename"]).name == f"{pipeline}.py":  # the pattern matches preorders.py for orders too
                reason = broken["stack_trace"].strip().splitlines()[-1]
                raise PermanentError(f"Airflow cannot read {broken['filename']}: {reason}") from None

    def _check_listener(self, event: str, _details: dict[str, Any]) -> None:
        """Refuse to send anything over a new connection if another account owns its other end."""
        if event == "http11.send_request_headers.started" and self._server:
            self._server.check()

    def _request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, extensions={"trace": self._check_listener}, **arguments)
        except httpx.RequestError as error:
            raise AirflowUnavailable(
                f"Airflow does not answer at {self._http.base_url}: {error}. Start it: tidegate up"
            ) from error

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        answer = self._request(method, path, **arguments)
        if answer.status_code == httpx.codes.UNAUTHORIZED and "Authorization" in self._http.headers:
            self._log_in()  # the token has expired: it holds for a day
            answer = self._request(method, path, **arguments)
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise UnknownPipeline(f"Airflow has no {path}. Is there a file for it in dags/? See also: tidegate status")
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise PermanentError("Airflow refuses the user or password; see: tidegate settings")
        if answer.is_server_error:
            raise AirflowUnavailable(f"Airflow failed with {answer.status_code} on {path}. See the api-server's log.")
        if answer.is_client_error:
            raise PermanentError(f"Airflow refused {method} {path} with {answer.status_code}: {answer.text[:300]}")
        try:
            content = answer.json() if answer.is_success else None
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise self._is_another(path)
        return content

    def _is_another(self, path: str) -> AirflowUnavailable:
        url = self._http.base_url
        return AirflowUnavailable(f"What answers at {url}{path} is not Airflow. Correct airflow_url: tidegate settings")
