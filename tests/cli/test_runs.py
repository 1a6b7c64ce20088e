"""A run that `trigger --wait` follows, with an Airflow that says what the test wants."""

import pytest

from tests.cli.conftest import CommandLine
from tests.store import encode_metadata
from tidegate import airflow_client
from tidegate.commands.act import run_verbs
from tidegate.jobs.pipelines import flights
from tidegate.state_store import Settings, StateStore


class Airflow:
    """An Airflow whose run plans two batches, and is a success at once."""

    PLAN = airflow_client.AirflowClient.PLAN

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def trigger(self, _pipeline: str, _parameters: dict[str, int]) -> str:
        with StateStore.connect(self._settings) as store:
            assert store.open_batches(flights.PIPELINE.spec, "run", [], None, [encode_metadata({"files": []})] * 2)
        return "run"

    def run_state(self, _pipeline: str, _run_id: str) -> str:
        return "success"

    def has_run(self, _pipeline: str, _run_id: str) -> bool:
        return False

    def task_instances(self, _pipeline: str, _run_id: str, _state: str | None = None) -> list[dict[str, str]]:
        return [{"task_id": "plan", "state": "success"}]

    def close(self) -> None:
        """Close nothing."""


@pytest.mark.promise("error:RUN_UNFINISHED", "verb:trigger")
def test_a_run_that_was_marked_as_done_is_no_success(
    tidegate: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(airflow_client, "AirflowClient", Airflow)
    monkeypatch.setattr(Settings, "load", lambda *_, **__: tidegate.settings)
    with pytest.raises(run_verbs.RunUnfinished, match=r"txids 1-2 have not committed: .*tidegate trigger flights --wait"):
        run_verbs.through_airflow("flights", {}, 10, as_json=False)
    assert "Committed" not in capsys.readouterr().out
