"""What only a real Airflow can show, on one whole stack: README's own project, in order of its commands, with its shop's data.

README's commands make the project and start its stack, and its last one ends the stack. In between, processes are killed, runs
meet, an operator uses the page in a browser, and another account of the machine looks around.
"""

import csv
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import pytest
from playwright.sync_api import Browser, expect

from tests.conftest import COMMAND
from tests.end_to_end import kinds
from tests.end_to_end.conftest import SEES_CONNECTIONS_OF_TASKS, Project, wait_for, waiting_process
from tests.page.browsers import Trouble, Visit, dialog_of, focused, launched, needs_chromium, row_of, tab_to
from tests.readme.console import Shell, blocks
from tests.readme.test_readme import OWN, README, STACK
from tests.servers import QUICK_TO_START, do_not_sync
from tests.stack.conftest import Stack, occupied, session  # noqa: F401 - occupied is a fixture
from tests.stack.neighbour import SCAN, account, command_as
from tidegate.airflow_client import AirflowClient
from tidegate.dags.batch_trigger import COMMIT, PROCESS
from tidegate.jobs.engine.txid_ranges import next_run
from tidegate.stack.components import airflow_cleanup
from tidegate.stack.components.airflow import PROCESSES, USERS_VARIABLE
from tidegate.stack.components.airflow import PROJECT as REPOSITORY
from tidegate.stack.components.server_process import is_alive
from tidegate.stack.layout import Layout
from tidegate.stack.supervisor import HUNG_AFTER_SECONDS
from tidegate.state_store import Settings

COLLEAGUES = Path(__file__).resolve().parent / "shop"  # pipelines and Dags besides README's
FINISHED = ("success", "failed")
CONCURRENCY = 4  # of a Dag that says nothing else
COMPONENTS = ["postgres", "spark", *(f"airflow-{process}" for process in PROCESSES)]
SHOPS = ("Lisbon", "Porto", "Faro")
NASTY = 'back from "backup" <img src=x onerror=document.title="XSS"> \u202e\u05e9\u05dc\u05d5\u05dd\u202c 🦀'
RUN_OF_ANOTHER_DAY = """
    INSERT INTO log (dttm, event) VALUES (now() - make_interval(days => %(age)s), %(name)s);
    INSERT INTO dag_run (dag_id, run_id, run_type, state, start_date, run_after, log_template_id, clear_number)
    SELECT 'orders', %(name)s, 'manual', 'success', started, started, max(id), 0
    FROM log_template, (SELECT now() - make_interval(days => %(age)s)) AS a (started) GROUP BY started
"""
# What Airflow keeps of tasks and their runs.
KEPT_BY_AIRFLOW = ("xcom", "rendered_task_instance_fields", "task_instance", "trigger", "dag_run", "log", "serialized_dag")


@dataclass
class Shop(Project):
    """The project of README, whose pipeline orders adds up the revenue of each shop, and its stack."""

    shell: Shell

    @cached_property
    def client(self) -> AirflowClient:
        return self.airflow()

    @property
    def stack(self) -> Stack:
        return Stack(self.home)

    def sell(self, files: int) -> list[int]:
        """Let files with orders arrive; return the txids that they will get."""
        folder = self.home / "data/orders"
        last = len(list(folder.iterdir()))
        for number in range(last + 1, last + files + 1):
            rows = [{"shop": SHOPS[(number + row) % 3], "cents": 100 * number + row} for row in range(5)]
            (folder / f"2027-{number:04}.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return list(range(last + 1, last + files + 1))

    def check_orders(self) -> None:
        """Each order has counted once: the state is what plain Python adds up, and all files have committed."""
        files = list((self.home / "data/orders").iterdir())
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        orders, cents = Counter(row["shop"] for row in rows), Counter[str]()
        for row in rows:
            cents[row["shop"]] += row["cents"]
        assert self.revenue() == [(shop, orders[shop], cents[shop]) for shop in sorted(orders)]
        assert self.committed("orders") == len(files)

    def revenue(self) -> list[tuple[Any, ...]]:
        return self.ask("SELECT shop, orders, cents FROM state.revenue ORDER BY shop")

    def ledger(self, pipeline: str = "orders") -> list[tuple[Any, ...]]:
        """Return all that is recorded of a pipeline's batches."""
        tables = ("cursor", "batch", "attempt", "commit")
        return [
            row
            for table in tables
            for row in self.ask(f"SELECT t::text FROM tidegate.{table} t WHERE pipeline = %s ORDER BY 1", pipeline)
        ]

    def depart(self, *numbers: int) -> None:
        for number in numbers:
            kinds.depart(self.home / f"data/departures/{number:03}.csv", number)

    def check_kinds(self) -> None:
        """Each state of pipeline kinds is what DuckDB computes from the files."""
        with closing(self.as_administrator()) as connection:
            assert kinds.found(connection) == kinds.wanted(self.home / "data/departures/*.csv")

    def run(self, pipeline: str) -> str:
        """Run a pipeline's Dag, which has to succeed; return the run's name."""
        run_id = self.client.trigger(pipeline, {})
        assert self.end_of(pipeline, run_id) == "success"
        return run_id

    def end_of(self, pipeline: str, run_id: str) -> str:
        """Wait for the end of a run; return its state."""

        def state() -> str | None:
            return found if (found := self.client.run_state(pipeline, run_id)) in FINISHED else None

        return str(wait_for(state, f"the end of a run of {pipeline}", every=0.5))

    def tasks(self, run_id: str, task_id: str, pipeline: str = "orders") -> dict[str, str]:
        found = [task for task in self.client.task_instances(pipeline, run_id) if task["task_id"] == task_id]
        return {t["rendered_map_index"]: t["state"] for t in sorted(found, key=lambda task: task["map_index"])}

    def command(self, *arguments: str) -> Callable[[], Any]:
        """Start a verb; return a function that waits for its success and returns what it prints."""
        process = self.start(*arguments)

        def outcome() -> tuple[dict[str, Any], str]:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            return json.loads(out), err

        return outcome

    def secrets(self) -> dict[str, str]:
        """Return every secret of the stack, by its place."""
        found = {}
        for file in sorted((self.stack.folder / "secrets").iterdir()):
            content = file.read_text()
            if file.name.startswith("pgpass"):
                found |= {f"{file.name} {line.split(':')[3]}": line.split(":")[4] for line in content.splitlines()}
            elif file.name == "spark.conf":
                settings = dict(line.split(maxsplit=1) for line in content.splitlines())
                found[file.name] = settings["spark.connect.authenticate.token"]
            elif file.suffix == ".json":
                found |= {f"{file.name} {user}": password for user, password in json.loads(content).items()}
            else:
                found[file.name] = content.strip()
        return found


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, occupied: set[int]) -> Iterator[Shop]:  # noqa: F811 - the fixture
    """The project that README makes beside its clone, in a folder with a difficult name, while usual ports are taken."""
    folder = tmp_path_factory.mktemp("readme") / "Zürich à la carte"
    (folder / "tidegate/examples").mkdir(parents=True)
    shutil.copytree(COLLEAGUES, folder / "shop", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(COMMAND.parent), os.environ["PATH"]]),
        "JDK_JAVA_OPTIONS": QUICK_TO_START,
        "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "600",  # no Dag changes: reading all again takes core seconds
        "TIDEGATE_LOCK_TIMEOUT_SECONDS": "10",  # tests hold locks for as long as anything waits for them
        USERS_VARIABLE: "admin:admin,viewer:viewer",
    }
    shell = Shell(folder / "tidegate/examples", environment, folder / "variables")
    try:
        start, *others = blocks(README, begin=OWN, end=STACK)
        shell.run_block(*start)
        settings = Settings.load({**os.environ, "TIDEGATE_HOME": str(folder / "shop")})
        do_not_sync(settings)
        for block in others:
            shell.run_block(*block)
        yield Shop(folder / "shop", folder, settings, shell)
    finally:
        subprocess.run([COMMAND, "down", "--delete-data", "--yes"], cwd=folder / "shop", check=True, capture_output=True)


@pytest.mark.promise("verb:trigger")
def test_readmes_own_project_does_what_readme_shows(shop: Shop) -> None:
    """Its commands have printed what is shown below them; what was counted by `run` and by Airflow is each file once."""
    assert shop.shell.folder == shop.home
    assert shop.ask("SELECT count(*) FROM tidegate.commit WHERE pipeline = 'orders'") == [(3,)]
    shop.check_orders()


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("performance:commit-task-starts-and-mostly-ends-in")
def test_batches_that_wait_hold_no_worker_then_commit_in_order_and_cleared_tasks_find_their_work_done(shop: Shop) -> None:
    """While nothing can commit, one batch more is processed than the Dag has workers for, and all commits wait as triggers."""
    txids = shop.sell(CONCURRENCY + 1)
    names = dict.fromkeys([f"txid {txid}" for txid in txids], "success")

    def count(task_id: str, state: str) -> int:
        return list(shop.tasks(run_id, task_id).values()).count(state)

    with shop.held("commit"):
        run_id = shop.client.trigger("orders", {})
        wait_for(lambda: shop.phases("orders", txids) == ["processed"] * len(txids), "processing of all batches")
        # The process task that waits for the cursor cannot end, but all the others can. The first batch's commit task waits
        # beside it, if the batch was left to be merged with others, so that its own process task is over.
        wait_for(lambda: count(PROCESS, "success") >= len(txids) - 1, "the end of processing", every=0.3)
        wait_for(lambda: count(COMMIT, "deferred") >= len(txids) - 1, "waits in the triggerer", every=0.3)
        assert max(count(PROCESS, "running"), count(COMMIT, "running")) <= 1
    assert shop.end_of("orders", run_id) == "success"
    assert shop.tasks(run_id, PROCESS) == shop.tasks(run_id, COMMIT) == names
    in_time = shop.ask("SELECT txid FROM tidegate.commit WHERE pipeline = 'orders' ORDER BY merged_at, txid")
    assert [txid for (txid,) in in_time] == list(range(1, txids[-1] + 1))
    shop.check_orders()

    before = shop.revenue(), shop.ledger()
    cleared = {"dry_run": False, "dag_run_id": run_id, "only_failed": False, "reset_dag_runs": True}
    entries = shop.client._call("POST", "/api/v2/dags/orders/clearTaskInstances", json=cleared)["total_entries"]
    assert entries == 1 + 2 * len(txids)
    assert shop.end_of("orders", run_id) == "success"
    assert (shop.revenue(), shop.ledger()) == before


def test_why_names_a_refused_plan_a_full_pool_or_a_paused_dag_and_the_run_that_is_kept_by_it(shop: Shop) -> None:
    """The ledger sees unread data and no process; Airflow has a run: refused, with no slot for its plan, or not looked at."""

    def give(slots: int) -> None:
        shop.client._call("PATCH", "/api/v2/pools/default_pool", params={"update_mask": "slots"}, json={"slots": slots})

    def pause(is_paused: bool) -> None:
        shop.client._call("PATCH", "/api/v2/dags/orders", params={"update_mask": "is_paused"}, json={"is_paused": is_paused})

    def causes() -> dict[str, str]:
        return {cause["code"]: cause["sentence"] for cause in shop.json("why", "orders")["causes"]}

    (txid,) = shop.sell(1)
    refused = shop.client.trigger("orders", {"max_batchs": 1})
    assert shop.end_of("orders", refused) == "failed"
    assert refused in causes()["RUN_REFUSED"]
    try:
        give(0)
        run_id = shop.client.trigger("orders", {})
        wait_for(lambda: shop.client.run_state("orders", run_id) == "running", "the start of the run")
        found = causes()
        assert run_id in found["RUN_ACTIVE"]
        assert "pool default_pool" in found["POOL_FULL"]
        pause(True)
        found = causes()
        assert "RUN_ACTIVE" not in found
        assert run_id in found["DAG_PAUSED"]
    finally:
        pause(False)
        give(128)
    assert shop.end_of("orders", run_id) == "success"
    assert shop.committed("orders") == txid


@pytest.mark.promise("verb:backfill")
def test_a_paused_pipeline_opens_no_batch_and_a_resumed_one_backfills_a_range_without_gaps(shop: Shop) -> None:
    """Three batches wait at the source; a run that is started meanwhile is skipped."""
    first, second, third = shop.sell(3)
    before = shop.ledger()
    shop.tidegate("pause", "orders", "--reason", "the database is upgraded")
    run_id = shop.run("orders")
    assert {task["state"] for task in shop.client.task_instances("orders", run_id)} == {"skipped"}
    assert [row for row in shop.ledger() if row not in before] == []
    shop.tidegate("resume", "orders", "--reason", "it is done")

    refused = shop.tidegate("backfill", "orders", "--from-txid", str(second), "--to-txid", str(third), exit_code=2)
    assert f"txid {first} would be left out" in refused.stderr

    outcome = shop.json("backfill", "orders", "--from-txid", str(first - 1), "--to-txid", str(second))
    assert (outcome["already_committed"], outcome["committed"]) == ([first - 1], [first, second])
    assert shop.committed("orders") == second

    beyond = shop.tidegate("backfill", "orders", "--from-txid", str(third), "--to-txid", str(third + 1), exit_code=75)
    assert f"no data yet for txid {third + 1}" in beyond.stderr
    shop.check_orders()


@pytest.mark.promise("json:trigger")
def test_a_backlog_is_worked_off_by_a_chain_of_runs_with_a_batch_that_is_skipped(shop: Shop) -> None:
    """A commit without its rows takes its place, and the next batch commits after it, in the run that goes on."""
    (folder := shop.home / "data/ratings").mkdir()
    for day, stars in enumerate(("5", '"many"', "3"), start=1):
        (folder / f"{day}.json").write_text(f'{{"shop": "Faro", "stars": {stars}}}\n')

    outcome = shop.json("trigger", "ratings", "--wait")

    first, second = outcome["runs"]
    assert (first, second) == (outcome["run_id"], next_run(outcome["run_id"]))
    assert (outcome["committed"], outcome["skipped"]) == ([1, 3], [2])
    assert [shop.tasks(run, COMMIT, "ratings") for run in (first, second)] == [
        {"txid 1": "success", "txid 2": "success"},
        {"txid 3": "success"},
    ]
    assert shop.ask("SELECT shop, ratings, stars FROM state.rating") == [("Faro", 2, 8)]
    commits = shop.ask("SELECT txid, skipped_reason FROM tidegate.commit WHERE pipeline = 'ratings' ORDER BY txid")
    assert [(txid, bool(reason)) for txid, reason in commits] == [(1, False), (2, True), (3, False)]
    assert "MALFORMED_RECORD" in commits[1][1]


# -- kills and coincidences --------------------------------------------------------------------------------------------


@pytest.mark.promise("fault:airflow-loses-repeats-or-reorders-tasks:processing")
@SEES_CONNECTIONS_OF_TASKS
def test_every_kind_of_state_survives_killed_tasks(shop: Shop) -> None:
    """One task dies before its seal, one in a commit that has changed all states: each of them equals what DuckDB computes."""
    shop.ask(kinds.OUTBOX_DDL)
    shop.depart(1, 2)
    run_id = shop.client.trigger("kinds", {})
    with shop.held("seal"):
        waiting_process(shop.settings, "INSERT INTO tidegate.seal%'kinds'").kill()
    with shop.held("commit"):
        waiting_process(shop.settings, "%INSERT INTO tidegate.commit%'kinds'").kill()
        assert shop.committed("kinds") == 0

    assert shop.end_of("kinds", run_id) == "success"
    shop.check_kinds()
    ((most,),) = shop.ask("SELECT max(attempt) FROM tidegate.attempt WHERE pipeline = 'kinds'")
    assert most >= 2
    assert shop.json("inspect", "kinds", "--txid", "1")["checks"]


def test_other_dags_follow_a_pipeline_by_its_asset(shop: Shop) -> None:
    """The run above has started them, and says what it committed; one with nothing new is skipped, and starts none."""
    path = "/api/v2/dags/follower/dagRuns"

    def said() -> list[Any]:
        runs = [run for run in shop.client._call("GET", path)["dag_runs"] if run["state"] in FINISHED]
        entries = [f"{path}/{run['dag_run_id']}/taskInstances/look/xcomEntries/return_value" for run in runs]
        return [shop.client._call("GET", entry, params={"stringify": "false"})["value"] for entry in entries]

    before = shop.ledger("kinds")
    idle = shop.run("kinds")
    assert {task["state"] for task in shop.client.task_instances("kinds", idle)} == {"skipped"}
    assert shop.ledger("kinds") == before
    assert shop.client._call("GET", "/api/v2/assets/events")["total_entries"] == 1
    wait_for(lambda: said() == [[{"first_txid": 1, "last_txid": 2}]], "the other Dag's run", every=0.5)


@pytest.mark.promise(
    "fault:airflow-loses-repeats-or-reorders-tasks:processing", "fault:airflow-loses-repeats-or-reorders-tasks:commit"
)
def test_two_runs_of_a_pipeline_and_one_of_another_at_the_same_moment_count_nothing_twice(shop: Shop) -> None:
    """Both runs are active at once over the same files; the other pipeline commits beside them."""
    shop.depart(3, 4)
    shop.sell(2)

    runs = [(pipeline, shop.client.trigger(pipeline, {})) for pipeline in ("kinds", "orders", "kinds")]

    assert [shop.end_of(*run) for run in runs] == ["success"] * 3
    assert shop.committed("kinds") == 4
    shop.check_kinds()
    shop.check_orders()


@pytest.mark.soak
def test_a_followed_run_goes_on_after_most_of_airflow_was_killed(shop: Shop) -> None:
    """The scheduler's forked workers end with it, the command asks until the server is back, and other components stay."""
    txids, stack = shop.sell(3), shop.stack
    before = stack.statuses()
    killed = {name: before[f"airflow-{name}"] for name in ("scheduler", "triggerer", "api-server")}
    outcome = shop.command("trigger", "orders", "--wait")
    with shop.held("commit"):
        wait_for(lambda: "processed" in shop.phases("orders", txids), "processing of a batch")
        family = [process for process in stack.processes() if session(process) == killed["scheduler"].pid]
        assert len(family) > 1
        for status in killed.values():
            psutil.Process(status.pid).kill()
        wait_for(lambda: not any(map(is_alive, family)), "the end of the scheduler's workers")

    ended, said = outcome()
    assert "asking again" in said
    assert ended["committed"] == txids
    shop.check_orders()
    after = stack.statuses()
    assert {name: after[f"airflow-{name}"].restarts for name in killed} == dict.fromkeys(killed, 1)
    assert {name for name, status in after.items() if status.pid != before[name].pid} == {s.name for s in killed.values()}


# -- the page in a browser ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as started:
        yield started


@pytest.fixture(scope="module")
def operator(browser: Browser, shop: Shop) -> Visit:
    return Visit(browser, shop, "admin")


@pytest.fixture(scope="module")
def trouble(shop: Shop) -> Trouble:
    """A batch of orders that needs a person, and a run that has failed because of it."""
    made = Trouble(shop, "orders", shop.sell(4))
    wait_for(lambda: made.tasks()["commit", f"txid {made.waits}"] == "deferred", "the wait for its turn", every=0.5)
    made.let_commit()
    return made


@needs_chromium
def test_an_operator_sees_what_waits_and_why(trouble: Trouble, operator: Visit) -> None:
    """From the overview to the batch, by following links; Airflow shows the same task as failed."""
    assert trouble.tasks()["process", f"txid {trouble.changed}"] == "failed"
    assert trouble.tasks()["commit", f"txid {trouble.waits}"] == "success"
    with operator.page() as page:
        row = row_of(page, "orders")
        expect(row).to_contain_text("2 txids")
        expect(row.get_by_role("link", name="SOURCE_CHANGED")).to_be_visible()
        expect(page.get_by_text("1 pipeline needs a person")).to_be_visible()

        row.get_by_role("link", name="orders", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("orders")
        page.get_by_role("link", name=re.compile(f"^txid {trouble.changed}, failed after .*SOURCE_CHANGED")).click()

        expect(page.get_by_role("heading", level=1)).to_contain_text("halted")
        expect(page.locator(".why-chain")).to_contain_text("SOURCE_CHANGED")
        expect(page.get_by_role("table", name=re.compile("^files"))).to_contain_text(trouble.file.name)
        expect(page.get_by_role("link", name="Dag run in Airflow")).to_have_attribute("href", re.compile(trouble.run_id[:10]))


@needs_chromium
def test_every_view_is_accessible_and_fits(trouble: Trouble, operator: Visit) -> None:
    """On a narrow screen, in the dark, axe finds nothing serious, and the page never scrolls sideways."""
    assert trouble.problems(operator, "revenue", "narrow", "dark") == {}


@needs_chromium
def test_a_reader_is_offered_no_action_and_refused_one(shop: Shop, trouble: Trouble, browser: Browser) -> None:
    """The viewer reads why and how, and neither a button nor the server lets them act; without a login nothing is shown."""
    before = shop.ask("SELECT count(*) FROM tidegate.operator_action")
    with Visit(browser, shop, "viewer").page(f"pipelines/orders/batches/{trouble.changed}") as page:
        expect(page.locator(".why-chain")).to_contain_text("SOURCE_CHANGED")
        expect(page.get_by_text(f"tidegate retry orders {trouble.changed}").first).to_be_visible()
        buttons = page.get_by_role("button").all_inner_texts()
        assert [text for text in buttons if text not in ("live", "copy")] == []
        answer = page.evaluate(
            """async (where) => (await fetch(where, {method: 'POST', body: JSON.stringify({txid: 7, reason: 'mine'}),
               headers: {'Content-Type': 'application/json', 'X-Tidegate-Action': '1'}})).status""",
            "api/pipelines/orders/actions/retry",
        )
    assert answer == 403
    assert shop.ask("SELECT count(*) FROM tidegate.operator_action") == before

    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{shop.settings.airflow_url}/tidegate/")
        assert "/auth/login" in page.url
        assert context.request.get(f"{shop.settings.airflow_url}/tidegate/api/pipelines").status == 401


@needs_chromium
def test_an_action_outlives_a_login_that_ends_and_needs_no_mouse(shop: Shop, operator: Visit) -> None:
    """What was typed stays, and is sent after the next login; by Tab, Enter and typing alone the pipeline is resumed."""
    with operator.page("pipelines/kinds") as page:
        dialog = dialog_of(page, "Pause")
        dialog.get_by_role("textbox").fill("the database is upgraded")
        cookies = page.context.cookies()
        page.context.clear_cookies()
        dialog.get_by_role("button", name="Pause", exact=True).click()
        expect(dialog.get_by_role("alert")).to_contain_text("Log in again")
        expect(dialog.get_by_role("textbox")).to_have_value("the database is upgraded")
        page.context.add_cookies(cookies)  # type: ignore[arg-type]
        dialog.get_by_role("button", name="Pause", exact=True).click()
        expect(dialog).to_contain_text("kinds is paused")
        dialog.get_by_role("button", name="Close").click()

    with operator.page("pipelines/kinds") as page:
        expect(page.get_by_role("button", name="Resume", exact=True).first).to_be_visible()
        page.keyboard.press("Tab")
        assert focused(page) == "Skip to the content"
        tab_to(page, "Resume")
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_role("textbox")).to_be_focused()
        page.keyboard.type("upgraded")
        for _ in range(12):  # round and round, never out of the dialog (except to the browser's own controls)
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
        tab_to(page, "Resume")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("button", name="Close")).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        page.wait_for_function("document.activeElement !== document.body")  # given back after the next drawing
    assert not next(row for row in shop.json("status")["pipelines"] if row["pipeline"] == "kinds").get("paused_at")


@needs_chromium
def test_mended_and_retried_it_commits_before_the_operators_eyes(shop: Shop, trouble: Trouble, operator: Visit) -> None:
    """Put the file back, retry with a reason, watch; the page is not loaded again, and a double click acts once."""
    trouble.put_back()
    with operator.page(f"pipelines/orders/batches/{trouble.changed}") as page:
        page.evaluate("window.loadedOnce = true")
        sent: list[str] = []
        page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
        dialog = dialog_of(page, f"Retry txid {trouble.changed}")
        expect(dialog).to_contain_text("may be tried again")
        dialog.get_by_role("textbox").fill(NASTY)
        dialog.get_by_role("button", name=f"Retry txid {trouble.changed}", exact=True).dblclick()
        expect(dialog).to_contain_text("Airflow has started the run")
        page.keyboard.press("Escape")
        assert [url.rsplit("/", 1)[1] for url in sent] == ["retry", "dagRuns"]

        expect(page.get_by_role("heading", level=1)).to_contain_text("committed")
        done = page.get_by_role("table", name=f"What operators did with txid {trouble.changed}")
        expect(done).to_contain_text(NASTY)
        assert page.evaluate("window.loadedOnce")
        assert page.title() == f"{trouble.changed} · batches · orders · Tidegate"  # and not what the reason says

        page.get_by_role("link", name=f"txid {trouble.stuck} →").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("committed")
    shop.check_orders()


@needs_chromium
def test_a_key_is_found_and_all_of_a_state_downloaded(shop: Shop, operator: Visit) -> None:
    """The row and the file hold what SQL says."""
    rows = [[str(value) for value in row] for row in shop.ask("SELECT shop, orders, cents, txid FROM state.revenue")]
    with operator.page("pipelines/orders/states/revenue") as page:
        page.get_by_label("shop").fill("Porto")
        page.get_by_role("button", name="Find").click()
        expect(page.get_by_role("table").get_by_role("row")).to_have_count(2)
        found = page.get_by_role("row").last.locator("th, td").all_inner_texts()

        page.get_by_role("link", name="all rows").click()
        with page.expect_download() as started:
            page.get_by_role("link", name="Download CSV").click()
        with started.value.path().open(newline="", encoding="utf-8") as file:
            header, *downloaded = list(csv.reader(file))

    order = [("shop", "orders", "cents", "txid").index(name) for name in header]
    assert sorted(downloaded) == sorted([row[place] for place in order] for row in rows)
    assert found in downloaded


# -- the stack ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise("verb:up", "verb:status")
def test_up_again_changes_nothing_and_status_shows_each_component(shop: Shop, occupied: set[int]) -> None:  # noqa: F811
    """`up` on a healthy stack leaves every process running; the ports that others held when it started are not its own."""
    stack = shop.stack
    before, statuses = stack.sessions_of("supervisor"), stack.statuses()
    shop.tidegate("up")
    assert (stack.sessions_of("supervisor"), stack.statuses()) == (before, statuses)

    shown = {component["name"]: component for component in shop.json("status")["components"]}
    ports = Layout.load(shop.home).ports
    assert list(shown) == COMPONENTS
    assert shown["postgres"]["address"] == f"127.0.0.1:{ports['postgres']}"
    assert shown["spark"]["address"] == shop.settings.spark_remote == f"sc://127.0.0.1:{ports['spark']}"
    assert shop.settings.airflow_url == f"http://127.0.0.1:{ports['airflow']}"
    assert occupied & set(ports.values()) == set()
    assert Layout.load(shop.home).airflow.silent() == set()
    for component in shown.values():
        assert (component["state"], component["reason"]) == ("up", None)
        assert is_alive(psutil.Process(component["pid"]))
        assert Path(component["log"]).is_file()


def test_the_team_servers_health_check_understands_airflow(shop: Shop) -> None:
    """The check of docker-compose.yml's Airflow services agrees with the embedded one on a live Airflow."""
    environ = {"TIDEGATE_AIRFLOW_URL": shop.settings.airflow_url}
    command = [sys.executable, REPOSITORY / "compose" / "healthy.py"]
    for part in ("metadatabase", "scheduler", "dag_processor", "triggerer"):
        assert subprocess.run([*command, part], env=environ, check=False).returncode == 0, part
    unhealthy = subprocess.run([*command, "nonsense"], env=environ, capture_output=True, text=True, check=False)
    assert (unhealthy.returncode, unhealthy.stderr.strip()) == (1, "Airflow's health page says that nonsense is None")


@pytest.mark.promise("security:other-machines")
def test_everything_listens_on_loopback_only(shop: Shop) -> None:
    """Other machines reach no process of the stack, child processes included."""
    found = [place for process in shop.stack.processes() for place in listening(process, psutil.CONN_LISTEN, psutil.CONN_NONE)]

    ports = Layout.load(shop.home).ports
    assert {port for _, port in found} >= {ports[name] for name in ("postgres", "spark", "airflow")}
    assert [place for place in found if place[0].removeprefix("::ffff:") not in {"127.0.0.1", "::1"}] == []


@pytest.mark.promise("security:another-account-in-file-system")
def test_secrets_are_in_private_files_and_nowhere_else(shop: Shop) -> None:
    """Not in an argument or environment of a process, a log, XCom or anything else that Airflow keeps of the runs above."""
    folder, secrets = shop.stack.folder, shop.secrets()
    assert {file.name for file in (folder / "secrets").iterdir() if stat.S_IMODE(file.stat().st_mode) != 0o600} == set()
    assert stat.S_IMODE((folder / "secrets").stat().st_mode) == 0o700
    assert len(secrets) >= 12
    assert min(len(secret) for secret in secrets.values()) >= 20

    logs = [log for log in folder.rglob("*.log*") if log.is_file()]
    texts = {f"log {log}": log.read_text(errors="replace") for log in logs}
    for process in shop.stack.processes():
        with suppress(psutil.NoSuchProcess):
            texts[f"arguments of {process.pid}"] = "\0".join(process.cmdline())
            texts[f"environment of {process.pid}"] = "\0".join(process.environ().values())
    for file in ("stack.json", "run/stack.status"):
        texts[file] = (folder / file).read_text()
    of_airflow = {**shop.settings.conninfo(user="postgres"), "dbname": "airflow"}
    with closing(psycopg2.connect(**of_airflow)) as connection, connection.cursor() as cursor:
        for table in KEPT_BY_AIRFLOW:
            cursor.execute(f"SELECT t::text FROM {table} t")
            texts[f"table {table}"] = "\n".join(row for (row,) in cursor)
    assert {f"log {folder / 'logs' / name}.log" for name in [*COMPONENTS, "supervisor"]} <= texts.keys()
    assert [log for log in logs if "task_id=batch.process" in str(log)], "no log of a task was looked at"
    assert texts["table xcom"]
    assert [(name, place) for name, secret in secrets.items() for place, text in texts.items() if secret in text] == []


@pytest.mark.promise("security:another-account-of-same-machine-at-ports", "security:another-account-in-file-system")
def test_another_account_sees_nothing(shop: Shop) -> None:
    """A scan by another account, of files, folders, processes and listeners, opens nothing and finds no secret anywhere."""
    user, stack = account(), shop.stack
    paths = [os.path.relpath(path, stack.folder) for path in stack.folder.rglob("*") if not path.is_symlink()]
    of_process = {process: listening(process, psutil.CONN_LISTEN) for process in stack.processes()}
    listeners = sorted(set().union(*of_process.values()))
    request = {
        "paths": [".", *paths],
        "secrets": shop.secrets(),
        "since": (stack.folder / "secrets" / "pgpass").stat().st_mtime,
        "listeners": listeners,
    }
    command = command_as(user, SCAN, imports=f"import os; os.chdir({str(stack.folder)!r})\n")
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=400, check=False)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(paths) > 30
    assert (found["opened"], found["listed"], found["written"]) == ([], [], [])
    assert {place: names for place, names in found["texts"].items() if names} == {}
    arguments = {place for place in found["texts"] if place.endswith("/cmdline")}
    assert {f"/proc/{process.pid}/cmdline" for process in stack.processes()} & arguments, "it saw no process of the stack"
    ports = Layout.load(shop.home).ports
    others = {port for _, port in listeners} - {ports[name] for name in ("postgres", "spark", "airflow")}
    of_spark = {
        port
        for process, places in of_process.items()
        if session(process) == stack.statuses()["spark"].pid  # with the daemons of Python that it has started
        for _, port in places
    }
    assert others == of_spark - {ports["spark"]}, "only Spark has ports besides, which ask for its secret (test_neighbours.py)"


def listening(process: psutil.Process, *kinds: str) -> set[tuple[str, int]]:
    """Return the addresses of a process's sockets of these kinds; none if it has ended."""
    with suppress(psutil.Error):
        return {(c.laddr.ip, c.laddr.port) for c in process.net_connections("inet") if c.laddr and c.status in kinds}
    return set()


@pytest.mark.soak
def test_airflows_history_is_kept_for_a_while_only(shop: Shop) -> None:
    """Each day the supervisor has old runs removed from Airflow's database, and old logs of tasks; newer ones stay."""
    airflow, kept = Layout.load(shop.home).airflow, shop.settings.airflow_history_days
    day = airflow_cleanup.DAY_SECONDS
    owner = {**shop.settings.conninfo(user="airflow"), "dbname": "airflow"}
    with closing(psycopg2.connect(**owner)) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        for name, age in {"old": kept + 1, "new": kept - 1}.items():
            (log := airflow.folder / f"logs/dag_id=former/run_id={name}/attempt=1.log").parent.mkdir(parents=True)
            log.write_text("text")
            for path in (log, log.parent):
                os.utime(path, times=(time.time() - age * day,) * 2)
            cursor.execute(RUN_OF_ANOTHER_DAY, {"name": name, "age": age})

        def remembered() -> list[str]:
            cursor.execute("SELECT event FROM log UNION ALL SELECT run_id FROM dag_run")
            return sorted(name for (name,) in cursor.fetchall() if name in ("old", "new"))

        assert remembered() == ["new", "new", "old", "old"]
        os.utime(airflow_cleanup.marker(airflow.folder), times=(time.time() - 2 * day,) * 2)
        wait_for(lambda: "old" not in remembered(), "the removal of old runs", 120)
        assert remembered() == ["new", "new"]
    assert {folder.name for folder in (airflow.folder / "logs/dag_id=former").iterdir()} == {"run_id=new"}
    assert not airflow_cleanup.is_due(airflow.folder)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_part_of_airflow_that_lives_without_a_heartbeat_is_started_again(shop: Shop) -> None:
    """As a scheduler does that has lost its database and waits for a worker for ever."""
    before = shop.stack.statuses()
    psutil.Process(before["airflow-triggerer"].pid).suspend()
    wait_for(lambda: Layout.load(shop.home).airflow.silent() == {"airflow-triggerer"}, "the silence", 120)
    wait_for(lambda: shop.stack.statuses()["airflow-triggerer"].state == "up", "another triggerer", HUNG_AFTER_SECONDS + 120)
    after = shop.stack.statuses()
    assert {name for name, status in after.items() if status.pid != before[name].pid} == {"airflow-triggerer"}
    (txid,) = shop.sell(1)
    shop.run("orders")
    assert shop.committed("orders") == txid


@pytest.mark.promise("verb:down")
def test_readmes_last_command_leaves_no_process(shop: Shop) -> None:
    """`down` ends Airflow's processes and their forks, and leaves the data; a second `down` says that nothing was running."""
    processes, data = shop.stack.processes(), Layout.load(shop.home).postgres.data
    assert len(processes) > len(COMPONENTS)

    for block in blocks(README, begin=STACK):
        shop.shell.run_block(*block)

    assert [process for process in processes if is_alive(process)] == []
    assert shop.stack.marked() == []
    assert shop.stack.working_in(shop.stack.folder, data) == []
    assert data.is_dir()
    assert shop.tidegate("down").stderr.strip() == "Nothing was running."
