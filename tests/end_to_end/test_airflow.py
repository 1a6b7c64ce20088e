"""A day's flights through a real Airflow of their own, at full size; what a small shop shows is in `test_one_airflow.py`."""

import json
from contextlib import closing
from typing import Any

import pytest

from tests.end_to_end.conftest import SEES_CONNECTIONS_OF_TASKS, Project, wait_for
from tidegate.dags.batch_trigger import PROCESS

CONCURRENCY = 4  # of pipeline flights
pytestmark = pytest.mark.soak


@pytest.mark.promise("verb:trigger")
def test_a_run_commits_every_batch_and_equals_an_independent_computation(project: Project) -> None:
    """60 files, 15 to a batch: four txids, in order, and the state that DuckDB computes from the same files."""
    outcome = project.json("trigger", "flights", "--wait")

    assert (outcome["state"], outcome["txids"], outcome["committed"]) == ("success", [1, 2, 3, 4], [1, 2, 3, 4])
    assert project.flights() == project.flights_from_raw_files()
    ledger = project.json("inspect", "flights")
    assert [batch["txid"] for batch in sorted(ledger, key=lambda batch: batch["committed_at"])] == [1, 2, 3, 4]
    assert sum(batch["source_rows"] for batch in ledger) == sum(row["flights"] for row in project.flights())


@SEES_CONNECTIONS_OF_TASKS
def test_a_task_that_is_killed_while_it_helps_leaves_the_batch_to_its_own(project: Project) -> None:
    """One batch has no worker yet; another task claims it and dies, and the batch's own task does the work again."""
    *others, last = project.next_flights(CONCURRENCY + 1)
    run = project.start("trigger", "flights", "--wait")
    with closing(project.as_administrator()) as connection, connection.cursor() as cursor:
        connection.autocommit = True

        def began() -> Any:
            cursor.execute("SELECT airflow_task_id FROM tidegate.attempt WHERE pipeline = 'flights' AND txid = %s", [last])
            return cursor.fetchone()

        (helper,) = wait_for(began, "the attempt of a task that helps", every=0.01)
    assert helper in {f"{PROCESS} of txid {txid}" for txid in others}
    with project.held("seal") as held:
        held.kill_waiting_process(f"INSERT INTO tidegate.seal%'flights', {last},")

    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert json.loads(out)["committed"] == [*others, last]
    tasks = [a["airflow_task_id"] for a in project.json("inspect", "flights", "--txid", str(last))["attempts"]]
    assert tasks == [helper, PROCESS]
    assert project.flights() == project.flights_from_raw_files()


@SEES_CONNECTIONS_OF_TASKS
def test_a_changed_file_halts_its_pipeline_and_no_other(project: Project) -> None:
    """One byte of a planned file changes before the retry: SourceChanged names the file; restoring it is enough."""
    (txid,) = project.next_flights(1)
    file = max((project.home / "data" / "flights").iterdir())
    planned = file.read_bytes()
    run = project.start("trigger", "flights", "--wait")
    with project.held("seal") as held:
        held.kill_waiting_process("INSERT INTO tidegate.seal")
        file.write_bytes(planned[:-2] + (b"1" if planned[-2:-1] == b"0" else b"0") + b"\n")

    _, err = run.communicate(timeout=300)
    assert run.returncode == 1
    assert "SOURCE_CHANGED" in err
    assert str(file) in err
    assert project.committed("flights") == txid - 1

    project.add_files("word_count", 1)
    assert project.json("trigger", "word_count", "--wait")["committed"]

    file.write_bytes(planned)
    assert project.json("trigger", "flights", "--wait")["committed"] == [txid]
    assert project.flights() == project.flights_from_raw_files()
