"""What only a real Airflow can show, on one stack: README's own project, in order of its commands, with its shop's data."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from itertools import product
from pathlib import Path

import psutil
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.checkout import REPOSITORY
from tests.conftest import COMMAND
from tests.end_to_end.conftest import SEES_CONNECTIONS_OF_TASKS, Shop, wait_for, waiting_process
from tests.page.browsers import SIZES, Trouble, Visit, dialog_of, launched, needs_chromium
from tests.readme.console import Shell, blocks
from tests.readme.test_readme import OWN, README, STACK
from tests.servers import QUICK_TO_START, do_not_sync
from tests.stack.conftest import occupied, session  # noqa: F401 - occupied is a fixture
from tests.stack.neighbour import SCAN, account, command_as
from tests.statements import execute
from tidegate.dags.batch_trigger import COMMIT, PROCESS
from tidegate.jobs.engine.txid_ranges import next_run
from tidegate.stack.components.airflow import PROCESSES, USERS_VARIABLE
from tidegate.stack.components.server_process import is_alive
from tidegate.stack.layout import Layout
from tidegate.state_store import Settings

COLLEAGUES = Path(__file__).resolve().parent / "shop"  # pipelines and Dags besides README's
CONCURRENCY = 2  # of the Dag of returns
COMPONENTS = ["postgres", "spark", *(f"airflow-{process}" for process in PROCESSES)]
NASTY = 'back from "backup" <img src=x onerror=document.title="XSS"> \u202e\u05e9\u05dc\u05d5\u05dd\u202c 🦀'
# What Airflow keeps of tasks and their runs.
KEPT_BY_AIRFLOW = ("xcom", "rendered_task_instance_fields", "task_instance", "trigger", "dag_run", "log", "serialized_dag")
IN_DOCS = {"overview-narrow-dark", "timeline-wide-light", "timeline-wide-dark", "batch-narrow-light", "airflow-grid"}


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
        "AIRFLOW__CORE__PARALLELISM": "8",  # each worker takes some as well
        "TIDEGATE_LOCK_TIMEOUT_SECONDS": "10",  # tests hold locks for as long as anything waits for them
        USERS_VARIABLE: "admin:admin, viewer:viewer",
    }
    shell = Shell(folder / "tidegate/examples", environment, folder / "variables")
    try:
        start, *others = blocks(README, begin=OWN, end=STACK)
        shell.run_block(*start)
        settings = Settings.load({**os.environ, "TIDEGATE_HOME": str(folder / "shop")})
        do_not_sync(settings)
        for block in others:
            shell.run_block(*block)
        yield Shop(folder / "shop", settings, shell)
    finally:
        subprocess.run([COMMAND, "down", "--delete-data", "--yes"], cwd=folder / "shop", check=True, capture_output=True)


@pytest.mark.promise("verb:trigger")
def test_readmes_own_project_does_what_readme_shows(shop: Shop) -> None:
    """Its commands have printed what is shown below them; what was counted by `run` and by Airflow is each file once."""
    assert shop.shell.folder == shop.home
    assert shop.ask("SELECT count(*) FROM tidegate.commit WHERE pipeline = 'orders'") == [(3,)]
    shop.check()


@pytest.mark.promise("performance:commit-task-starts-and-mostly-ends-in")
def test_batches_that_wait_hold_no_worker_then_commit_in_order_and_cleared_tasks_find_their_work_done(shop: Shop) -> None:
    """While nothing can commit, one batch more is processed than the Dag has workers for, and all commits wait as triggers."""
    txids = shop.sell(CONCURRENCY + 1, "returns")
    names = dict.fromkeys([f"txid {txid}" for txid in txids], "success")

    def count(task_id: str, state: str) -> int:
        return list(shop.tasks(run_id, task_id, "returns").values()).count(state)

    with shop.held("commit"):
        run_id = shop.client.trigger("returns", {})
        wait_for(lambda: shop.phases(txids, "returns") == ["processed"] * len(txids), "processing of all batches")
        # The process task that waits for the cursor cannot end, but all the others can. The first batch's commit task waits
        # beside it, if the batch was left to be merged with others, so that its own process task is over.
        wait_for(lambda: count(PROCESS, "success") >= len(txids) - 1, "the end of processing", every=0.3)
        wait_for(lambda: count(COMMIT, "deferred") >= len(txids) - 1, "waits in the triggerer", every=0.3)
        assert max(count(PROCESS, "running"), count(COMMIT, "running")) <= 1
    assert shop.end_of("returns", run_id) == "success"
    assert shop.tasks(run_id, PROCESS, "returns") == shop.tasks(run_id, COMMIT, "returns") == names
    in_time = shop.ask("SELECT txid FROM tidegate.commit WHERE pipeline = 'returns' ORDER BY merged_at, txid")
    assert [txid for (txid,) in in_time] == txids
    shop.check("returns")

    before = shop.state("returns"), shop.ledger("returns")
    cleared = {"dry_run": False, "dag_run_id": run_id, "only_failed": False, "reset_dag_runs": True}
    entries = shop.client._call("POST", "/api/v2/dags/returns/clearTaskInstances", json=cleared)["total_entries"]
    assert entries == 1 + 2 * len(txids)
    assert shop.end_of("returns", run_id) == "success"
    assert (shop.state("returns"), shop.ledger("returns")) == before


@pytest.mark.promise("verb:backfill")
def test_a_paused_pipeline_opens_no_batch_and_a_resumed_one_backfills_a_range_without_gaps(shop: Shop) -> None:
    first, second, third = shop.sell(3)
    before = shop.ledger()
    shop.tidegate("pause", "orders", "--reason", "the database is upgraded")
    assert {task["state"] for task in shop.client.task_instances("orders", shop.run("orders"))} == {"skipped"}
    assert [row for row in shop.ledger() if row not in before] == []
    shop.tidegate("resume", "orders", "--reason", "it is done")
    refused = shop.tidegate("backfill", "orders", "--from-txid", str(second), "--to-txid", str(third), exit_code=2)
    assert f"txid {first} would be left out" in refused.stderr
    outcome = shop.json("backfill", "orders", "--from-txid", str(first - 1), "--to-txid", str(second))
    assert (outcome["already_committed"], outcome["committed"]) == ([first - 1], [first, second])
    assert shop.committed("orders") == second
    beyond = shop.tidegate("backfill", "orders", "--from-txid", str(third), "--to-txid", str(third + 1), exit_code=75)
    assert f"no data yet for txid {third + 1}" in beyond.stderr
    shop.check()


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
    assert shop.tasks(first, COMMIT, "ratings") == {"txid 1": "success", "txid 2": "success"}
    assert shop.tasks(second, COMMIT, "ratings") == {"txid 3": "success"}
    assert shop.ask("SELECT shop, ratings, stars FROM state.rating") == [("Faro", 2, 8)]
    commits = shop.ask("SELECT txid, skipped_reason FROM tidegate.commit WHERE pipeline = 'ratings' ORDER BY txid")
    assert [(txid, bool(reason)) for txid, reason in commits] == [(1, False), (2, True), (3, False)]
    assert "MALFORMED_RECORD" in commits[1][1]


@pytest.mark.promise("fault:airflow-loses-repeats-or-reorders-tasks:processing")
@SEES_CONNECTIONS_OF_TASKS
def test_a_batch_survives_killed_tasks(shop: Shop) -> None:
    (txid,) = shop.sell(1, "returns")
    run_id = shop.client.trigger("returns", {})
    with shop.held("seal"):
        waiting_process(shop.settings, "INSERT INTO tidegate.seal%'returns'").kill()
    with shop.held("commit"):
        waiting_process(shop.settings, "%INSERT INTO tidegate.commit%'returns'").kill()
        assert shop.committed("returns") == txid - 1
    assert shop.end_of("returns", run_id) == "success"
    shop.check("returns")
    ((most,),) = shop.ask("SELECT max(attempt) FROM tidegate.attempt WHERE pipeline = 'returns' AND txid = %s", txid)
    assert most >= 2


@pytest.mark.promise("fault:airflow-loses-repeats-or-reorders-tasks:processing")
@pytest.mark.promise("fault:airflow-loses-repeats-or-reorders-tasks:commit")
def test_two_runs_of_a_pipeline_and_one_of_another_at_the_same_moment_count_nothing_twice(shop: Shop) -> None:
    shop.sell(2, "returns")
    shop.sell(2)
    runs = [(pipeline, shop.client.trigger(pipeline, {})) for pipeline in ("returns", "orders", "returns")]
    assert [shop.end_of(*run) for run in runs] == ["success"] * 3
    shop.check("returns")
    shop.check()


@pytest.fixture(scope="module")
def operator(shop: Shop) -> Iterator[Visit]:
    with launched() as browser:
        yield Visit(browser, shop, "admin")


def keep(page: Page, name: str) -> None:
    """Renew a picture of the documentation, if that is wanted (`make pictures`)."""
    if name in IN_DOCS and os.environ.get("PICTURES"):
        page.mouse.move(0, 0)
        page.wait_for_timeout(1000)  # Airflow's panels slide in
        taken = Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(colors=128, dither=Image.Dither.NONE)
        taken.save(REPOSITORY / f"docs/page/{name}.png", optimize=True)


@pytest.fixture(scope="module")
def trouble(shop: Shop, operator: Visit) -> Trouble:
    made = Trouble(shop)
    wait_for(lambda: shop.tasks(made.run_id, COMMIT)[f"txid {made.waits}"] == "deferred", "the wait for its turn", every=0.5)
    if os.environ.get("PICTURES"):
        with operator.page(path=f"/dags/orders/runs/{made.run_id}") as page:
            page.get_by_role("button", name="Expand all task groups").click()
            keep(page, "airflow-grid")
    made.let_commit()
    return made


@needs_chromium
@pytest.mark.soak
def test_every_view_is_accessible_and_fits_in_each_size_and_scheme(trouble: Trouble, operator: Visit) -> None:
    for size, scheme in product(SIZES, ("light", "dark")):
        keep_some = lambda page, view, to=f"{size}-{scheme}": keep(page, f"{view}-{to}")  # noqa: E731
        assert trouble.problems(operator, size, scheme, keep_some) == {}


@needs_chromium
def test_mended_and_retried_it_commits_before_the_operators_eyes(shop: Shop, trouble: Trouble, operator: Visit) -> None:
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
        expect(page.get_by_role("table", name=f"What operators did with txid {trouble.changed}")).to_contain_text(NASTY)
        assert page.evaluate("window.loadedOnce")
        assert page.title() == f"{trouble.changed} · batches · orders · Tidegate"  # and not what the reason says
        page.get_by_role("link", name=f"txid {trouble.stuck} →").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("committed")
    shop.check()


@pytest.mark.promise("verb:up", "verb:status")
def test_up_again_changes_nothing_and_status_shows_each_component(shop: Shop, occupied: set[int]) -> None:  # noqa: F811
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
    environ = {"TIDEGATE_AIRFLOW_URL": shop.settings.airflow_url}
    for part in ("metadatabase", "scheduler", "dag_processor", "triggerer"):  # as the team server's containers ask
        subprocess.run([sys.executable, REPOSITORY / "compose/healthy.py", part], env=environ, check=True)


@pytest.mark.promise("security:another-account-in-file-system")
def test_secrets_are_in_private_files_and_nowhere_else(shop: Shop) -> None:
    secrets, texts = shop.secrets(), shop.stack.texts()
    assert len(secrets) >= 12
    assert {f"logs/{name}.log" for name in [*COMPONENTS, "supervisor"]} <= texts.keys()
    assert [place for place in texts if "task_id=batch.process" in place], "no log of a task was looked at"
    of_airflow = {**shop.settings.conninfo(user="postgres"), "dbname": "airflow"}
    for table in KEPT_BY_AIRFLOW:
        texts[f"table {table}"] = "\n".join(row for (row,) in execute(of_airflow, f"SELECT t::text FROM {table} t"))
    assert texts["table xcom"]
    shop.stack.check_secret(secrets, texts)


@pytest.mark.promise("security:other-machines", "security:another-account-in-file-system")
@pytest.mark.promise("security:another-account-of-same-machine-at-ports")
def test_other_machines_reach_nothing_and_another_account_sees_nothing(shop: Shop) -> None:
    user, stack, ports = account(), shop.stack, Layout.load(shop.home).ports
    paths = [os.path.relpath(path, stack.folder) for path in stack.folder.rglob("*") if not path.is_symlink()]
    of_process = {process: listening(process, psutil.CONN_LISTEN) for process in stack.processes()}
    listeners = sorted(set().union(*of_process.values()))
    assert {port for _, port in listeners} >= {ports[name] for name in ("postgres", "spark", "airflow")}
    reachable = {place for process in of_process for place in listening(process, psutil.CONN_LISTEN, psutil.CONN_NONE)}
    assert [place for place in reachable if place[0].removeprefix("::ffff:") not in {"127.0.0.1", "::1"}] == []

    since = (stack.folder / "secrets" / "pgpass").stat().st_mtime
    request = {"paths": [".", *paths], "secrets": shop.secrets(), "since": since, "listeners": listeners}
    command = command_as(user, SCAN, imports=f"import os; os.chdir({str(stack.folder)!r})\n")
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(paths) > 30
    assert (found["opened"], found["listed"], found["written"]) == ([], [], [])
    assert {place: names for place, names in found["texts"].items() if names} == {}
    arguments = {place for place in found["texts"] if place.endswith("/cmdline")}
    assert {f"/proc/{process.pid}/cmdline" for process in of_process} & arguments, "it saw no process of the stack"
    # Only Spark has ports besides, with its daemons of Python; they ask for its secret (test_neighbours.py).
    spark = stack.statuses()["spark"].pid
    of_spark = {port for process, places in of_process.items() if session(process) == spark for _, port in places}
    assert {port for _, port in listeners} - {ports[name] for name in ("postgres", "airflow")} == of_spark


def listening(process: psutil.Process, *kinds: str) -> set[tuple[str, int]]:
    """Return the addresses of a process's sockets of these kinds; none if it has ended."""
    with suppress(psutil.Error):
        return {(c.laddr.ip, c.laddr.port) for c in process.net_connections("inet") if c.laddr and c.status in kinds}
    return set()


@pytest.mark.promise("verb:down")
def test_readmes_last_command_leaves_no_process(shop: Shop) -> None:
    processes = shop.stack.processes()
    assert len(processes) > len(COMPONENTS)
    for block in blocks(README, begin=STACK):
        shop.shell.run_block(*block)
    shop.stack.check_is_over(processes)
    assert Layout.load(shop.home).postgres.data.is_dir()
    assert shop.tidegate("down").stderr.strip() == "Nothing was running."
