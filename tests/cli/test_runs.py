"""A run that `trigger --wait` follows, with an Airflow that says what the test wants; and the log of one without Airflow."""

import json

import pytest

from tests.cli.conftest import CommandLine, write_flights
from tests.store import Attempt, Tracked, encode_metadata
from tidegate import airflow_client
from tidegate.commands.act import run_verbs
from tidegate.jobs.pipelines import flights
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import PipelinePaused, SourceUnreadable

SPEC = flights.PIPELINE.spec


class Airflow:
    """An Airflow whose run plans some batches, and is a success at once."""

    PLAN = airflow_client.AirflowClient.PLAN
    planned, plan_state, paused_by, plan_error = 0, "skipped", "", ""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def trigger(self, pipeline: str, _parameters: dict[str, int]) -> str:
        with StateStore.connect(self._settings) as store:
            metadata = [encode_metadata({"files": [], "n": n}) for n in range(self.planned)]
            assert len(store.open_batches(SPEC, "run", [], None, metadata)) == self.planned
            if self.paused_by:
                store.pause(pipeline, self.paused_by, "the warehouse is moved")
            if self.plan_error:
                store.fail_plan(pipeline, store.begin_plan(pipeline, "another run"), "another run", self.plan_error)
        return "run"

    def run_state(self, _pipeline: str, _run_id: str) -> str:
        return "failed" if self.plan_error else "success"

    def has_run(self, _pipeline: str, _run_id: str) -> bool:
        return False

    def task_instances(self, _pipeline: str, _run_id: str, _state: str | None = None) -> list[dict[str, str]]:
        return [{"task_id": "plan", "state": self.plan_state}]

    def close(self) -> None:
        """Close nothing."""


@pytest.fixture
def airflow(tidegate: CommandLine, monkeypatch: pytest.MonkeyPatch) -> type[Airflow]:
    monkeypatch.setattr(airflow_client, "AirflowClient", Airflow)
    monkeypatch.setattr(Settings, "load", lambda *_, **__: tidegate.settings)
    for name in ("planned", "plan_state", "paused_by", "plan_error"):
        monkeypatch.setattr(Airflow, name, getattr(Airflow, name))  # what a test sets is taken back
    return Airflow


def _trigger() -> None:
    run_verbs.through_airflow("flights", {}, 10, as_json=False)


@pytest.mark.promise("error:RUN_UNFINISHED", "verb:trigger")
def test_a_run_that_was_marked_as_done_is_no_success(airflow: type[Airflow], capsys: pytest.CaptureFixture[str]) -> None:
    """Airflow calls it one, and the ledger knows better: programs that wait for the run must not go on."""
    airflow.planned = 2
    with pytest.raises(run_verbs.RunUnfinished, match=r"txids 1-2 have not committed: .*tidegate trigger flights --wait"):
        _trigger()
    assert "Committed" not in capsys.readouterr().out


def test_a_run_without_batches_says_why(airflow: type[Airflow], capsys: pytest.CaptureFixture[str]) -> None:
    _trigger()
    assert "Skipped: nothing new at the source" in capsys.readouterr().out
    airflow.plan_state = "success"
    with pytest.raises(run_verbs.RunUnfinished, match="before it planned anything"):
        _trigger()
    airflow.plan_state, airflow.paused_by = "skipped", "anna"
    with pytest.raises(PipelinePaused, match="paused by anna"):
        _trigger()
    assert "nothing new" not in capsys.readouterr().out


def test_the_runs_that_go_on_with_a_backlog_are_followed_to_the_last(
    airflow: type[Airflow], tidegate: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    airflow.planned = 2

    def run_state(_airflow: Airflow, pipeline: str, run_id: str) -> str:
        with StateStore.connect(tidegate.settings) as store:
            if run_id == "continued_2__run":
                store.open_batches(SPEC, run_id, [], store.last_opened(pipeline), [encode_metadata({"files": [], "n": 3})])
            for txid in store.run_txids(pipeline, run_id):
                attempt = store.start_attempt(SPEC, txid, run_id)
                if isinstance(attempt, Attempt):
                    store.seal(attempt, [], Tracked(0))
                    store.commit_batch(SPEC, txid, run_id)
        return "success"

    monkeypatch.setattr(Airflow, "run_state", run_state)
    monkeypatch.setattr(Airflow, "has_run", lambda _airflow, _pipeline, run_id: run_id == "continued_2__run")

    outcome = run_verbs.through_airflow("flights", {}, 10, as_json=False)

    assert (outcome.committed, outcome.runs) == ([1, 2, 3], ["run", "continued_2__run"])
    assert "Committed: txids 1-3." in capsys.readouterr().out  # the result, for pipes; progress is on stderr


def test_a_run_whose_plan_fails_says_why(airflow: type[Airflow]) -> None:
    airflow.plan_error = "SOURCE_UNREADABLE: The folder is gone.\nCreate it."
    story = r"failed in plan \(1\)\. flights waits for a plan that succeeds: SOURCE_UNREADABLE: The folder is gone\. Create it"
    with pytest.raises(SourceUnreadable, match=story):  # its code, not that of any error
        _trigger()


def test_the_log_as_json_names_the_batch_of_each_line(tidegate: CommandLine) -> None:
    write_flights(tidegate.settings.home, 1, "2013,1,1,517,2,UA,1545,EWR,IAH,1400")
    done = tidegate("run", "flights", "--log-json", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    ours = {line["event"]: line for line in lines if line["logger"].startswith("tidegate.jobs.")}
    (sealed,) = (line for event, line in ours.items() if "sealed" in event)
    (committed,) = (line for event, line in ours.items() if " committed, " in event)
    for line in (sealed, committed):
        assert (line["pipeline"], line["txid"], line["attempt"], line["level"]) == ("flights", 1, 1, "info")
