"""Exactly-once from files to states through a real Airflow, even if processes are killed on the way."""

import json
from contextlib import closing
from typing import Any

import pytest

from tests.conftest import register_pipelines
from tests.end_to_end import kinds
from tests.end_to_end.conftest import SEES_CONNECTIONS_OF_TASKS, Project, wait_for
from tidegate.dags.batch_trigger import COMMIT, PROCESS

FINISHED = ("success", "failed")
CONCURRENCY = 4  # of pipeline flights


@pytest.mark.promise("verb:trigger", "performance:commit-task-starts-and-mostly-ends-in")
def test_a_run_commits_every_batch_and_equals_an_independent_computation(project: Project) -> None:
    """60 files, 15 to a batch: four txids, in order, and the state that DuckDB computes from the same files."""
    outcome = project.json("trigger", "flights", "--wait")

    assert (outcome["state"], outcome["txids"], outcome["committed"]) == ("success", [1, 2, 3, 4], [1, 2, 3, 4])
    assert project.flights() == project.flights_from_raw_files()
    ledger = project.json("inspect", "flights")
    assert [batch["txid"] for batch in sorted(ledger, key=lambda batch: batch["committed_at"])] == [1, 2, 3, 4]
    assert sum(batch["source_rows"] for batch in ledger) == sum(row["flights"] for row in project.flights())


def test_airflow_shows_txids_and_not_positions(project: Project) -> None:
    """So a batch of the run can be found by its txid."""
    run_id = project.json("trigger", "word_count", "--wait")["run_id"]

    tasks = project.airflow().task_instances("word_count", run_id)
    names = {(task["task_id"], task["rendered_map_index"]) for task in tasks if task["map_index"] >= 0}
    assert names == {(task, name) for task in (PROCESS, COMMIT) for name in ("txid 1", "txid 2")}


def test_batches_that_wait_for_their_turn_hold_no_worker(project: Project) -> None:
    """While nothing can commit, one batch more is processed than the Dag has workers for."""
    airflow, txids = project.airflow(), project.next_flights(CONCURRENCY + 1)

    def tasks(task_id: str) -> list[tuple[str, str]]:
        found = [task for task in airflow.task_instances("flights", run_id) if task["task_id"] == task_id]
        return [(task["rendered_map_index"], task["state"]) for task in sorted(found, key=lambda task: task["map_index"])]

    def all_are(state: str) -> list[tuple[str, str]]:
        return [(f"txid {txid}", state) for txid in txids]

    def phases() -> list[str]:
        return [batch["phase"] for batch in project.json("inspect", "flights") if batch["txid"] in txids]

    with project.held("commit"):
        run_id = project.json("trigger", "flights")["run_id"]
        wait_for(lambda: phases() == ["processed"] * len(txids), "processing of all batches")
        # The task that holds the cursor cannot end, but all the others can. It is one of the process tasks, or a commit task if
        # the first batch was left to be merged with others.
        wait_for(lambda: [state for _, state in tasks(PROCESS)].count("success") >= len(txids) - 1, "the end of processing")
        wait_for(lambda: [state for _, state in tasks(COMMIT)].count("deferred") == len(txids) - 1, "waits in the triggerer")
        assert [state for _, state in tasks(PROCESS) + tasks(COMMIT)].count("running") <= 1
        assert {name for name, _ in tasks(COMMIT)} == {name for name, _ in all_are("")}

    wait_for(lambda: airflow.run_state("flights", run_id) in FINISHED, "the end of the run")
    assert tasks(PROCESS) == tasks(COMMIT) == all_are("success")
    assert project.flights() == project.flights_from_raw_files()


def test_a_run_with_nothing_new_is_skipped_and_spends_nothing(project: Project) -> None:
    """State, cursor and ledger stay as they are."""
    before = project.flights(), project.json("inspect", "flights")

    outcome = project.json("trigger", "flights", "--wait")

    assert (outcome["state"], outcome["txids"]) == ("success", [])
    assert {task["state"] for task in project.airflow().task_instances("flights", outcome["run_id"])} == {"skipped"}
    assert (project.flights(), project.json("inspect", "flights")) == before


def test_only_added_files_are_read(project: Project) -> None:
    """The next txid's frozen metadata names the new files and no others."""
    (txid,) = project.next_flights(1)

    assert project.json("trigger", "flights", "--wait")["committed"] == [txid]

    batch = project.json("inspect", "flights", "--txid", str(txid))
    added = sorted(file.name for file in (project.home / "data" / "flights").iterdir())[-15:]
    assert [file["name"] for file in batch["source_metadata"]["files"]] == added
    assert project.flights() == project.flights_from_raw_files()


@pytest.mark.promise("verb:backfill")
def test_backfill_takes_a_range_reports_its_work_and_refuses_a_gap(project: Project) -> None:
    """Three batches wait at the source, after the committed ones."""
    first, second, third = project.next_flights(3)

    refused = project.tidegate("backfill", "flights", "--from-txid", str(second), "--to-txid", str(third), exit_code=2)
    assert f"txid {first} would be left out" in refused.stderr

    outcome = project.json("backfill", "flights", "--from-txid", str(first - 1), "--to-txid", str(second))
    assert (outcome["already_committed"], outcome["committed"]) == ([first - 1], [first, second])
    assert project.committed("flights") == second

    beyond = project.tidegate("backfill", "flights", "--from-txid", str(third), "--to-txid", str(third + 1), exit_code=75)
    assert f"no data yet for txid {third + 1}" in beyond.stderr
    assert project.committed("flights") == third
    assert project.flights() == project.flights_from_raw_files()


@pytest.mark.promise(
    "fault:airflow-loses-repeats-or-reorders-tasks:processing", "fault:airflow-loses-repeats-or-reorders-tasks:commit"
)
def test_two_runs_at_the_same_moment_count_nothing_twice(project: Project) -> None:
    """Both are active at once over the same files; one plans them, and a batch that both process counts once."""
    *_, last = project.next_flights(2)

    both = [project.start("trigger", "flights", "--wait") for _ in range(2)]
    outcomes = []
    for run in both:
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
        outcomes.append(json.loads(out))

    assert [outcome["state"] for outcome in outcomes] == ["success", "success"]
    assert project.committed("flights") == last
    assert project.flights() == project.flights_from_raw_files()


@pytest.mark.promise("fault:airflow-loses-repeats-or-reorders-tasks:processing")
@SEES_CONNECTIONS_OF_TASKS
@pytest.mark.soak
def test_a_task_that_is_killed_while_processing_is_tried_again(project: Project) -> None:
    """It dies with its rows staged and its seal not yet written: a new attempt does the work, the old one never counts."""
    txids = project.next_flights(2)
    run = project.start("trigger", "flights", "--wait")

    with project.held("seal") as held:
        held.kill_waiting_process("INSERT INTO tidegate.seal")

    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert json.loads(out)["committed"] == txids
    attempts = [batch["attempt"] for batch in project.json("inspect", "flights")][-2:]
    assert sorted(attempts) == [1, 2]
    assert project.flights() == project.flights_from_raw_files()


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
@pytest.mark.soak
def test_a_task_that_is_killed_while_committing_is_tried_again(project: Project) -> None:
    """It dies in the middle of its transaction, with the state already merged: Postgres rolls all of it back."""
    txids = project.next_flights(2)
    run = project.start("trigger", "flights", "--wait")

    with project.held("commit") as held:
        held.kill_waiting_process("INSERT INTO tidegate.commit")
        assert project.committed("flights") == txids[0] - 1

    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert json.loads(out)["committed"] == txids
    assert project.flights() == project.flights_from_raw_files()


@SEES_CONNECTIONS_OF_TASKS
def test_every_kind_of_state_survives_killed_tasks(project: Project) -> None:
    """One task dies before its seal, one in a commit that has changed all states: each of them equals what DuckDB computes."""
    with closing(project.as_administrator()) as connection, connection.cursor() as cursor:
        cursor.execute(kinds.OUTBOX_DDL)
        connection.commit()
    register_pipelines(project.settings, kinds.KINDS)
    run = project.start("trigger", "kinds", "--wait")
    with project.held("seal") as held:
        held.kill_waiting_process("INSERT INTO tidegate.seal%'kinds'")
    with project.held("commit") as held:
        held.kill_waiting_process("INSERT INTO tidegate.commit%'kinds'")
        assert project.committed("kinds") == 0

    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert json.loads(out)["committed"]
    with closing(project.as_administrator()) as connection:
        assert kinds.found(connection) == kinds.wanted(project.home / "data" / "flights" / "*.csv")
    assert project.json("inspect", "kinds", "--txid", "1")["checks"]


def test_a_run_goes_on_after_the_scheduler_and_its_tasks_were_killed(project: Project) -> None:
    """All of the scheduler's processes die at once, in mid-run; the supervisor starts it again and the run succeeds."""
    txids = project.next_flights(4)
    run = project.start("trigger", "flights", "--wait")
    project.kill_in_mid_run("airflow-scheduler")

    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert json.loads(out)["committed"] == txids
    assert project.flights() == project.flights_from_raw_files()
    assert project.component("airflow-scheduler")["restarts"] == 1


@pytest.mark.soak
def test_following_a_run_waits_for_a_server_that_is_away(project: Project) -> None:
    """The api-server dies in mid-run; the command asks again until it is back, and reports the run's end."""
    txids = project.next_flights(2)
    run = project.start("trigger", "flights", "--wait")
    project.kill_in_mid_run("airflow-api-server")

    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert "asking again" in err
    assert json.loads(out)["committed"] == txids
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


def test_one_key_is_looked_up_in_a_moment(project: Project) -> None:
    """The row is the same as in the whole state."""
    (found,) = project.json("get", "flights", "daily", "UA", "2013-01-01")

    expected = next(r for r in project.flights_from_raw_files() if (r["carrier"], r["date"]) == ("UA", "2013-01-01"))
    assert {name: found["row"][name] for name in expected} == expected
