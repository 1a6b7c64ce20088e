"""`tidegate up`, `down` and `status` on the real stack: it recovers from every kill, and ends without a trace.

Two stacks serve all tests: `running` without Airflow, which is restored before each test, and `full` with Airflow.
"""

import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg2
import pytest

from tests.stack.conftest import Stack
from tests.stack.neighbour import SCAN, account, command_as
from tidegate import stack as embedded
from tidegate.stack.components import airflow_cleanup, postgres
from tidegate.stack.components.airflow import PROCESSES, PROJECT
from tidegate.stack.components.postgres import EmbeddedPostgres
from tidegate.stack.components.server_process import is_alive, log_file, wait_until
from tidegate.stack.layout import Layout
from tidegate.state_store.base.errors import PermanentError

COMPONENTS = ["postgres", "spark", *(f"airflow-{process}" for process in PROCESSES)]


def can_query(stack: Stack) -> bool:
    """Return whether the ledger answers."""
    connection = psycopg2.connect(**stack.settings.conninfo())
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM tidegate.pipeline")
            return cursor.fetchone()[0] > 0
    finally:
        connection.close()


# -- starting ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("verb:up")
def test_two_operators_start_one_stack(small: Stack) -> None:
    """Two simultaneous `up` both succeed, and there is one supervisor with one process per component."""
    assert {status.state for status in small.statuses().values()} == {"up"}
    assert [len(small.sessions_of(name)) for name in ("supervisor", "postgres", "spark")] == [1, 1, 1]
    assert can_query(small)


def test_stale_pid_files_harm_no_other_process(small: Stack, bystander: psutil.Process) -> None:
    """`up` does not trust a pid file whose number another process has by now, or that is truncated."""
    assert is_alive(bystander)
    assert bystander.pid not in {status.pid for status in small.statuses().values()}


def test_down_with_stale_pid_files_harms_no_other_process(new_stack: Callable[[str], Stack], bystander: psutil.Process) -> None:
    """`down` does not trust such files either, and removes them."""
    stack = new_stack("stale")
    run = stack.folder / "run"
    run.mkdir(parents=True)
    for name in ("supervisor", "postgres"):
        (run / f"{name}.json").write_text(json.dumps({"pid": bystander.pid, "started": "another boot 4711"}))

    done = stack.tidegate("down")

    assert (done.returncode, done.stderr.strip()) == (0, "Nothing was running.")
    assert is_alive(bystander)
    assert list(run.iterdir()) == []


def test_a_copy_of_a_running_stack_leaves_it_alone(running: Stack, tmp_path: Path) -> None:
    """The copied records name live processes, but those are not the copy's: it neither ends them nor shows them as its own."""
    copy = Stack(tmp_path / "copy")
    shutil.copytree(running.folder, copy.home / running.folder.name, ignore=shutil.ignore_patterns("postgres"))
    before = {process.pid for process in running.processes()}

    shown, done = copy.statuses(), copy.tidegate("down")

    assert {status.state for status in shown.values()} == {"stopped"}
    assert (done.returncode, done.stderr.strip()) == (0, "Nothing was running.")
    assert {process.pid for process in running.processes()} == before
    assert {status.state for status in running.statuses().values()} == {"up"}


@pytest.mark.promise("verb:up")
def test_up_again_is_quick_and_changes_nothing(running: Stack) -> None:
    """`up` on a healthy stack leaves every process running."""
    before = {process.pid for process in running.processes()}
    statuses = running.statuses()

    done = running.tidegate("up", "--without-airflow")

    assert done.returncode == 0, done.stderr
    assert running.statuses() == statuses
    assert {process.pid for process in running.processes()} == before


@pytest.mark.promise("verb:status")
def test_status_shows_programs_the_state_of_each_component(running: Stack) -> None:
    """`status --json` names each component with state, address, process and log file."""
    done = running.tidegate("status", "--json")
    answer = {component["name"]: component for component in json.loads(done.stdout)["components"]}

    assert done.returncode == 0
    assert list(answer) == ["postgres", "spark"]
    assert answer["postgres"]["address"] == f"127.0.0.1:{running.settings.pg_port}"
    assert answer["spark"]["address"] == running.settings.spark_remote
    for component in answer.values():
        assert (component["state"], component["reason"]) == ("up", None)
        assert is_alive(psutil.Process(component["pid"]))
        assert Path(component["log"]).is_file()


NO_JAVA = {"nothing": None, "too old": 'openjdk version "11.0.2"', "too new": 'openjdk version "25" 2025-09-16'}


@pytest.mark.promise("error:PERMANENT_ERROR")
@pytest.mark.parametrize("version", NO_JAVA.values(), ids=NO_JAVA.keys())
def test_a_missing_java_is_reported_first(version: str | None, new_stack: Callable[[str], Stack]) -> None:
    """Without a suitable Java, the first line says so and what to install; nothing is started or written."""
    stack = new_stack("without-java")
    programs = stack.home / "programs"
    programs.mkdir()
    if version:
        (programs / "java").write_text(f"#!/bin/sh\necho '{version}' >&2\n")
        (programs / "java").chmod(0o755)

    done = stack.tidegate("up", PATH=str(programs), JAVA_HOME="")

    first, more, *others = done.stderr.splitlines()
    assert more == "More: tidegate error PERMANENT_ERROR"
    assert first.startswith("tidegate: Java is missing" if version is None else f"tidegate: {programs}/java is Java")
    assert "Install Java 17" in first
    assert (done.returncode, done.stdout, others) == (1, "", [])
    assert not stack.folder.exists()


def test_a_component_that_cannot_start_is_named_with_its_log(new_stack: Callable[[str], Stack]) -> None:
    """When Postgres cannot start, one line says so, names its log and quotes the reason; `down` still leaves nothing."""
    stack = new_stack("broken")
    with ExitStack() as ports:
        postgres = Layout.choose(stack.home, ports).postgres
    postgres.initialize()
    (postgres.data / "postgresql.conf").write_text("this is = no 'configuration\n")

    done = stack.tidegate("up", "--without-airflow")

    log = stack.folder / "logs" / "postgres.log"
    messages = [line for line in done.stderr.splitlines() if line.startswith("tidegate:")]
    assert done.returncode in {1, 75}
    assert len(messages) == 1
    assert "postgres did not come up" in messages[0]
    assert str(log) in messages[0]
    assert "postgresql.conf" in messages[0]
    assert "Traceback" not in done.stderr
    assert_ends(stack)


# -- staying up --------------------------------------------------------------------------------------------------------


def test_up_starts_only_what_has_given_up(running: Stack) -> None:
    """The other components and the supervisor stay as they are, and so does what they are doing."""
    before, supervisor = running.statuses(), running.supervisor()

    def has_given_up() -> bool:
        spark = running.statuses()["spark"]
        if spark.state != "gave up" and spark.pid is not None:
            with suppress(psutil.Error):
                psutil.Process(spark.pid).kill()
        return spark.state == "gave up"

    assert wait_until(has_given_up, 60)
    done = running.tidegate("up", "--without-airflow")

    assert done.returncode == 0, done.stderr
    after = running.statuses()
    assert {status.state for status in after.values()} == {"up"}
    assert (after["postgres"], running.supervisor()) == (before["postgres"], supervisor)


@pytest.mark.parametrize("name", ["postgres", "spark"])
def test_a_killed_component_comes_back(name: str, running: Stack) -> None:
    """After kill -9 the supervisor starts the component again, at the same address, and counts it."""
    before = running.statuses()
    remnant = running.folder / "spark" / "tmp" / "blockmgr-of-the-killed" / "rows"
    remnant.parent.mkdir(parents=True)
    remnant.write_text("rows")

    after = running.kill(name)

    assert remnant.exists() is (name != "spark")
    shutil.rmtree(remnant.parent, ignore_errors=True)
    assert after.restarts == before[name].restarts + 1
    assert after.address == before[name].address
    assert len(running.sessions_of(name)) == 1
    others = {other: status for other, status in before.items() if other != name}
    assert {other: running.statuses()[other] for other in others} == others
    assert can_query(running)


def test_a_killed_supervisor_is_replaced(running: Stack) -> None:
    """After kill -9 of the supervisor `up` restores the stack: a new supervisor, the old ports, no process doubled."""
    before, settings = running.processes(), running.settings
    supervisor = running.supervisor()
    supervisor.kill()

    assert wait_until(lambda: {status.state for status in running.statuses().values()} == {"stopped"}, 10)
    embedded.up(running.settings, without_airflow=True)

    assert not any(is_alive(process) for process in before)
    assert is_alive(running.supervisor())
    assert [len(running.sessions_of(name)) for name in ("postgres", "spark")] == [1, 1]
    assert running.settings == settings
    assert can_query(running)


def test_down_finds_the_processes_of_a_killed_supervisor(running: Stack, bystander: psutil.Process) -> None:
    """`down` ends every process of the stack, even if its supervisor was killed and its pid files are gone; no other."""
    supervisor = running.supervisor()
    supervisor.kill()
    for file in (running.folder / "run").iterdir():
        file.unlink()

    assert_ends(running)
    assert {status.state for status in running.statuses().values()} == {"stopped"}
    assert is_alive(bystander)


def assert_ends(stack: Stack) -> None:
    """Stop a stack; check that none of its processes lives, by marker, session or working folder."""
    processes = stack.processes()

    done = stack.tidegate("down")

    assert done.returncode == 0, done.stderr
    assert [process for process in processes if is_alive(process)] == []
    assert stack.marked() == []
    data = Layout.load(stack.home).postgres.data
    assert [process for process in psutil.process_iter() if works_in(process, stack.folder, data)] == []


def works_in(process: psutil.Process, *folders: Path) -> bool:
    """Return whether a process's working folder is one of these or below; False if the process ends meanwhile."""
    try:
        return any(Path(process.cwd()).is_relative_to(folder) for folder in folders)
    except (psutil.Error, OSError):
        return False


# -- the whole stack ---------------------------------------------------------------------------------------------------


def test_airflow_starts_in_a_folder_with_a_difficult_name(full: Stack) -> None:
    """Spaces and umlauts in the project's path do not matter; every process of Airflow is healthy."""
    statuses = full.statuses()
    token = httpx.post(
        f"{full.settings.airflow_url}/auth/token",
        json={"username": full.settings.airflow_user, "password": full.settings.airflow_password_file.read_text()},
    ).json()["access_token"]
    health = httpx.get(f"{full.settings.airflow_url}/api/v2/version", headers={"Authorization": f"Bearer {token}"})

    assert {name: status.state for name, status in statuses.items()} == dict.fromkeys(COMPONENTS, "up")
    assert health.status_code == httpx.codes.OK
    assert full.tidegate("status").returncode == 0


def test_airflow_keeps_the_python_path_of_its_operator(full: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow finds the pipelines that the shell's Python finds; the project's own modules come first."""
    airflow = Layout.load(full.home).airflow
    monkeypatch.delenv("PYTHONPATH", raising=False)
    ours = airflow.environment()["PYTHONPATH"].split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/srv/authors", "/srv/others"]))

    assert ours[0] == str(PROJECT)
    assert airflow.environment()["PYTHONPATH"].split(os.pathsep) == [*ours, "/srv/authors", "/srv/others"]


def test_taken_ports_are_left_to_their_holders(full: Stack, occupied: set[int]) -> None:
    """If the usual ports are taken, others are chosen, and the settings lead to them."""
    ports = Layout.load(full.home).ports
    settings = full.settings

    assert occupied & set(ports.values()) == set()
    assert len(set(ports.values())) == len(ports)
    assert (settings.pg_port, settings.spark_remote) == (ports["postgres"], f"sc://127.0.0.1:{ports['spark']}")
    assert settings.airflow_url == f"http://127.0.0.1:{ports['airflow']}"
    assert can_query(full)


@pytest.mark.promise("security:other-machines")
def test_everything_listens_on_loopback_only(full: Stack) -> None:
    """Other machines reach no process of the stack, child processes included."""
    ours = {process.pid for process in full.processes()}
    listening = [
        c for c in psutil.net_connections("inet") if c.pid in ours and c.status in {psutil.CONN_LISTEN, psutil.CONN_NONE}
    ]

    ports = Layout.load(full.home).ports
    assert {c.laddr.port for c in listening} >= {ports[name] for name in ("postgres", "spark", "airflow")}
    assert [c for c in listening if c.laddr.ip.removeprefix("::ffff:") not in {"127.0.0.1", "::1"}] == []


def secrets_of(stack: Stack) -> dict[str, str]:
    """Return every secret of a stack, by its place."""
    found = {}
    for file in sorted((stack.folder / "secrets").iterdir()):
        content = file.read_text()
        if file.name.startswith("pgpass"):
            found |= {f"{file.name} {line.split(':')[3]}": line.split(":")[4] for line in content.splitlines()}
        elif file.name == "spark.conf":
            found[file.name] = dict(line.split(maxsplit=1) for line in content.splitlines())["spark.connect.authenticate.token"]
        elif file.suffix == ".json":
            found |= {f"{file.name} {user}": password for user, password in json.loads(content).items()}
        else:
            found[file.name] = content.strip()
    return found


@pytest.mark.promise("security:another-account-in-file-system")
def test_secrets_are_private_files(full: Stack) -> None:
    """Each secret is in a file that only its owner can read, in a folder that only its owner can enter."""
    folder = full.folder / "secrets"

    assert {file.name for file in folder.iterdir() if stat.S_IMODE(file.stat().st_mode) != 0o600} == set()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(secrets_of(full)) >= 12
    assert min(len(secret) for secret in secrets_of(full).values()) >= 20


def test_secrets_are_nowhere_else(full: Stack) -> None:
    """No secret is in the arguments or environment of a process, in a log file, or among the settings."""
    texts = {f"log {log}": log.read_text(errors="replace") for log in full.folder.rglob("*.log*") if log.is_file()}
    for process in full.processes():
        texts[f"arguments of {process.pid}"] = "\0".join(process.cmdline())
        texts[f"environment of {process.pid}"] = "\0".join(process.environ().values())
    for file in ("stack.json", "run/stack.status"):
        texts[file] = (full.folder / file).read_text()
    secrets = secrets_of(full)

    assert {f"log {full.folder / 'logs' / name}.log" for name in [*COMPONENTS, "supervisor"]} <= texts.keys()
    assert [(name, place) for name, secret in secrets.items() for place, text in texts.items() if secret in text] == []


@pytest.mark.promise("security:another-account-of-same-machine-at-ports", "security:another-account-in-file-system")
def test_another_account_sees_nothing(full: Stack) -> None:
    """A scan by another account, of files, folders, processes and listeners, opens nothing and finds no secret anywhere."""
    user = account()
    paths = [os.path.relpath(path, full.folder) for path in full.folder.rglob("*") if not path.is_symlink()]
    listeners = sorted({(c.laddr.ip, c.laddr.port) for process in full.processes() for c in listening(process)})
    request = {
        "paths": [".", *paths],
        "secrets": secrets_of(full),
        "since": (full.folder / "secrets" / "pgpass").stat().st_mtime,
        "listeners": listeners,
    }
    command = command_as(user, SCAN, imports=f"import os; os.chdir({str(full.folder)!r})\n")
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=400, check=False)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(paths) > 30
    assert (found["opened"], found["listed"], found["written"]) == ([], [], [])
    assert {place: names for place, names in found["texts"].items() if names} == {}
    arguments = {place for place in found["texts"] if place.endswith("/cmdline")}
    assert {f"/proc/{process.pid}/cmdline" for process in full.processes()} & arguments, "it saw no process of the stack"
    ports = Layout.load(full.home).ports
    others = {port for _, port in listeners} - {ports[name] for name in ("postgres", "spark", "airflow")}
    (spark,) = [status.pid for status in full.statuses().values() if status.name == "spark"]
    of_spark = {c.laddr.port for c in listening(psutil.Process(spark))}
    assert others == of_spark - {ports["spark"]}, "only Spark has ports besides, which ask for its secret (test_neighbours.py)"


def listening(process: psutil.Process) -> list[Any]:
    """Return the listeners of a process; none if it has ended."""
    with suppress(psutil.Error):
        return [connection for connection in process.net_connections("inet") if connection.status == psutil.CONN_LISTEN]
    return []


@pytest.mark.parametrize("part", ["metadatabase", "scheduler", "dag_processor", "triggerer"])
def test_the_team_servers_health_check_understands_airflow(part: str, full: Stack) -> None:
    """The check of docker-compose.yml's Airflow services agrees with the embedded one on a live Airflow."""
    environ = {"TIDEGATE_AIRFLOW_URL": full.settings.airflow_url}
    command = [sys.executable, PROJECT / "compose" / "healthy.py"]

    assert subprocess.run([*command, part], env=environ, check=False).returncode == 0
    unhealthy = subprocess.run([*command, "nonsense"], env=environ, capture_output=True, text=True, check=False)
    assert (unhealthy.returncode, unhealthy.stderr.strip()) == (1, "Airflow's health page says that nonsense is None")


def test_a_killed_scheduler_comes_back_alone(full: Stack) -> None:
    """After kill -9 of the scheduler its forked workers are ended with it, before a new one starts; nothing else changes."""
    before = full.statuses()
    family = [process for process in full.processes() if os.getsid(process.pid) == before["airflow-scheduler"].pid]
    assert len(family) > 1

    after = full.kill("airflow-scheduler")

    assert after.restarts == 1
    assert not any(is_alive(process) for process in family)
    assert {n: s.pid for n, s in full.statuses().items() if n != after.name} == {
        n: s.pid for n, s in before.items() if n != after.name
    }


def test_airflows_history_is_kept_for_a_while_only(full: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each day the supervisor has old runs removed from Airflow's database, and old logs of tasks; newer ones stay."""
    airflow = Layout.load(full.home).airflow
    logs = airflow.folder / "logs"
    days = {"old": full.settings.airflow_history_days + 1, "new": full.settings.airflow_history_days - 1}
    for name, age in days.items():
        (log := logs / f"dag_id=flights/run_id={name}/attempt=1.log").parent.mkdir(parents=True)
        log.write_text("text")
        for path in (log, log.parent):
            os.utime(path, times=(time.time() - age * airflow_cleanup.DAY_SECONDS,) * 2)
    owner = {**full.settings.conninfo(user="airflow"), "dbname": "airflow"}
    with closing(psycopg2.connect(**owner)) as connection, connection, connection.cursor() as cursor:
        for name, age in days.items():
            times = {"name": name, "age": age}
            cursor.execute("INSERT INTO log (dttm, event) VALUES (now() - make_interval(days => %(age)s), %(name)s)", times)
            cursor.execute(
                "INSERT INTO dag_run (dag_id, run_id, run_type, state, start_date, run_after, log_template_id, clear_number)"
                " SELECT 'flights', %(name)s, 'manual', 'success', started, started, max(id), 0"
                " FROM log_template, (SELECT now() - make_interval(days => %(age)s)) AS a (started) GROUP BY started",
                times,
            )

    def remembered() -> list[str]:
        with closing(psycopg2.connect(**owner)) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT event FROM log UNION ALL SELECT run_id FROM dag_run")
            return sorted(name for (name,) in cursor.fetchall() if name in days)

    assert remembered() == ["new", "new", "old", "old"]
    os.utime(airflow_cleanup.marker(airflow.folder), times=(time.time() - 2 * airflow_cleanup.DAY_SECONDS,) * 2)

    log = log_file(full.folder, "airflow-history")
    assert wait_until(lambda: "old" not in remembered(), 120), log.read_text() if log.exists() else "it was not started"
    assert remembered() == ["new", "new"]
    assert {folder.name for folder in (logs / "dag_id=flights").iterdir()} == {"run_id=new"}
    assert not airflow_cleanup.is_due(airflow.folder)


@pytest.mark.promise("verb:down")
def test_down_leaves_no_process(full: Stack) -> None:
    """`down` ends Airflow's processes and their forks; a second `down` says that nothing was running."""
    assert_ends(full)

    assert full.tidegate("down").stderr.strip() == "Nothing was running."
    assert json.loads(full.tidegate("down", "--json").stdout) == {"ended_processes": 0}


def test_a_cluster_whose_passwords_are_gone_is_kept(tmp_path: Path) -> None:
    """If the secrets are deleted, the ledger is neither overwritten nor silently replaced by an empty one."""
    cluster = EmbeddedPostgres(tmp_path / ".tidegate", 1)
    cluster.initialize()
    content = (cluster.data / "PG_VERSION").read_text()
    cluster.passfile.unlink()
    try:
        with pytest.raises(PermanentError, match="holds the ledger and the states of an earlier stack here"):
            cluster.initialize()
        assert (cluster.data / "PG_VERSION").read_text() == content
        assert not cluster.passfile.exists()
    finally:
        cluster.delete()


# -- machines ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def computing(running: Stack) -> Iterator[psutil.Process]:
    """A busy backend of the stack's Postgres, which does not notice the death of its server."""
    settings = running.settings
    query = "SELECT sum(a) FROM generate_series(1, 100000) a, generate_series(1, 10000000) b"
    program = f"import psycopg2; psycopg2.connect(**{settings.conninfo()!r}).cursor().execute({query!r})"
    client = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL, start_new_session=True)
    with closing(psycopg2.connect(**settings.conninfo())) as connection, connection.cursor() as cursor:

        def backend() -> int | None:
            cursor.execute("SELECT pid FROM pg_stat_activity WHERE query = %s AND state = 'active'", [query])
            connection.rollback()
            return next((pid for (pid,) in cursor.fetchall()), None)

        assert wait_until(lambda: backend() is not None, 30)
        pid = backend()
    yield psutil.Process(pid)
    client.kill()
    client.wait()


def test_postgres_comes_back_though_a_backend_computes(running: Stack, computing: psutil.Process) -> None:
    """A busy backend does not notice its server's death, and while it lives no server starts, so it is ended first."""
    before = running.statuses()["postgres"]

    after = running.kill("postgres")

    assert not is_alive(computing)
    assert after.restarts == before.restarts + 1
    assert can_query(running)


@pytest.mark.parametrize("verb", ["up", "down"])
def test_a_backend_that_outlives_supervisor_and_server_is_found(verb: str, running: Stack, computing: psutil.Process) -> None:
    """If both are killed at once, `down` leaves nothing, and `up` recovers by itself."""
    server = psutil.Process(running.statuses()["postgres"].pid)
    supervisor = running.supervisor()
    for process in (supervisor, server):
        process.kill()
    assert wait_until(lambda: not is_alive(server), 10)
    assert is_alive(computing)

    done = running.tidegate(verb, *(["--without-airflow"] if verb == "up" else []))

    assert done.returncode == 0, done.stderr
    assert not is_alive(computing)
    if verb == "up":
        assert can_query(running)


def test_roots_cluster_keeps_the_account_that_it_was_made_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A better account that is created later does not separate a cluster from its files."""
    if os.geteuid() != 0:
        pytest.skip("only root's cluster runs under another account: run the tests as root")
    monkeypatch.setattr(postgres, "ACCOUNTS", ("nobody-has-this-name", "daemon", "nobody"))
    cluster = EmbeddedPostgres(tmp_path / ".tidegate", 1)
    cluster.initialize()
    daemon = pwd.getpwnam("daemon").pw_uid
    monkeypatch.setattr(postgres, "ACCOUNTS", ("nobody",))

    assert cluster.data.stat().st_uid == daemon
    assert EmbeddedPostgres(tmp_path / ".tidegate", 1).user == daemon
    assert EmbeddedPostgres(tmp_path / "another", 1).user == pwd.getpwnam("nobody").pw_uid
    cluster.delete()
