"""The team server's stack: docker-compose.yml agrees with the embedded stack, and its scripts work.

No Docker engine is needed: the file is compared with the embedded stack's own code, the scripts run here, and the roles are
made in a Postgres of the same version.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from runpy import run_path
from threading import Thread

import psutil
import psycopg2
import pytest
import yaml
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tests.servers import fetch_kafka
from tidegate.jobs.sources.kafka.login import kafka_client
from tidegate.stack.components import java_libraries, postgres
from tidegate.stack.components import server_process as components
from tidegate.stack.components.airflow import PROCESSES, PROJECT, airflow_settings
from tidegate.stack.components.kafka import HEAP_MEGABYTES, LOGGING, PACKAGES, VERSION
from tidegate.stack.components.postgres import ADMINISTRATOR, DATABASES, ROLES, EmbeddedPostgres
from tidegate.stack.layout import USUAL_PORTS, Layout
from tidegate.stack.supervisor import HUNG_AFTER_SECONDS
from tidegate.state_store import Settings

COMPOSE = PROJECT / "compose"
IMAGE_FOLDER = "/opt/tidegate"
STACK = yaml.safe_load((PROJECT / "docker-compose.yml").read_text())
SERVICES = STACK["services"]
AIRFLOW = [f"airflow-{process}" for process in PROCESSES]
COMMAND_LINES = {"tidegate", "tidegate-owner"}
ONE_SHOT = {"airflow-migrate", "tidegate-migrate", *COMMAND_LINES}
DOCKERFILE = (COMPOSE / "Dockerfile").read_text()


@pytest.fixture
def embedded(tmp_path: Path) -> Layout:
    """The embedded stack's layout with the usual ports; nothing of it runs."""
    (tmp_path / ".tidegate").mkdir(mode=0o711)
    (tmp_path / ".tidegate" / "stack.json").write_text(json.dumps({"ports": USUAL_PORTS}))
    return Layout.load(tmp_path)


def given(service: str, *, with_kafka: bool = False) -> dict[str, str]:
    """Return the environment of a service; all values are text, and some are empty without Kafka."""
    shared = [file for file in SERVICES[service].get("env_file", []) if isinstance(file, str)]  # others need not exist
    files = [properties_of(PROJECT / file) for file in shared]
    environment = {name: value for file in files for name, value in file.items()} | SERVICES[service].get("environment", {})
    only_with_kafka = re.compile(r"\$\{COMPOSE_PROFILES:\+([^}]*)\}")
    return {name: only_with_kafka.sub(r"\1" if with_kafka else "", value) for name, value in environment.items()}


def by_place(command: list[str]) -> list[str]:
    """Return a command with files by their names, because folders differ between machine and image."""
    return ["python" if word == sys.executable else Path(word).name if word.startswith("/") else word for word in command]


def properties_of(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().splitlines() if line and not line.startswith("#"))


# -- the same stack ----------------------------------------------------------------------------------------------------


def test_services_are_the_embedded_components(embedded: Layout) -> None:
    of_airflow = list(embedded.airflow.components())
    names = {part.component().name for part in (embedded.postgres, embedded.spark, embedded.kafka)}
    assert set(SERVICES) - ONE_SHOT - {"loopback", "airflow-history"} == names | {component.name for component in of_airflow}
    for component in [embedded.spark.component(), *of_airflow]:
        assert by_place(SERVICES[component.name]["command"]) == by_place(list(component.command))


@pytest.mark.promise("performance:settings-of-embedded-server", "limit:MAX_SHARED_BUFFERS")
def test_postgres_has_the_embedded_options(embedded: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    def options(words: list[str]) -> dict[str, str]:
        return dict(re.findall(r"-c ?(\w+)=(\S*)", " ".join(words)))

    expected, actual = options(list(embedded.postgres.component().command)), options(SERVICES["postgres"]["command"])
    of_the_machine = {"shared_buffers", "max_parallel_workers_per_gather"}
    assert int(expected["shared_buffers"].removesuffix("kB")) == min(psutil.virtual_memory().total // 4, 8 * 1024**3) // 1024
    monkeypatch.setattr(postgres, "MAX_SHARED_BUFFERS", 1024 * 1024)
    assert options(list(embedded.postgres.component().command))["shared_buffers"] == "1024kB"
    places = {"port", "listen_addresses", "unix_socket_directories"}
    assert expected.keys() - actual.keys() == {*places, "max_parallel_workers_per_gather"}
    assert {k: v for k, v in actual.items() if k not in of_the_machine} == {
        k: v for k, v in expected.items() if k not in of_the_machine | places
    }


@pytest.mark.promise("performance:limits-of-airflow-are-raised-its-scheduler")
@pytest.mark.parametrize("service", [*AIRFLOW, "airflow-migrate", "airflow-history"])
def test_airflow_has_the_embedded_settings(service: str, embedded: Layout) -> None:
    actual = {name: value for name, value in given(service).items() if name.startswith(("AIRFLOW", "OTEL_"))}
    expected = {name for name in embedded.airflow.environment() if name.startswith(("AIRFLOW", "OTEL_"))}
    assert {name: actual.get(name) for name in airflow_settings()} == airflow_settings()
    assert actual["AIRFLOW__CORE__DAG_DISCOVERY_SAFE_MODE"] == "False"
    assert actual.keys() == expected
    assert actual["AIRFLOW__CORE__DAGS_FOLDER"] == f"{given(service)['TIDEGATE_HOME']}/dags"


@pytest.mark.parametrize("service", ["spark", *sorted(COMMAND_LINES), "tidegate-migrate", "airflow-migrate", *AIRFLOW])
def test_every_service_has_the_addresses_of_the_others(service: str, embedded: Layout) -> None:
    variables = Settings.environment_names()
    actual = {name: value for name, value in given(service, with_kafka=True).items() if name.startswith(("TIDEGATE_", "PG"))}
    expected = {variables[name] for name in replace(embedded, extras=("kafka",)).settings()} | {
        "TIDEGATE_HOME",
        "TIDEGATE_WITNESS_FOLDER",
    }

    assert actual.keys() - {"TIDEGATE_SPARK_PACKAGES"} == expected
    settings = Settings.load(actual)
    assert settings.kafka_bootstrap.split(":")[0] in SERVICES
    assert Settings.load(given(service)).kafka_bootstrap is None
    assert settings.pg_host in SERVICES
    assert settings.spark_remote == embedded.settings()["spark_remote"]
    assert re.fullmatch(r"http://(.+):(\d+)", settings.airflow_url)[1] in SERVICES
    assert settings.airflow_user == embedded.settings()["airflow_user"]


@pytest.mark.promise("performance:spark-planner-is-compiled-late")
def test_spark_has_the_embedded_properties(embedded: Layout) -> None:
    def properties(text: str) -> dict[str, str]:
        return dict(line.split(maxsplit=1) for line in text.splitlines() if not line.startswith("#"))

    embedded.spark.initialize()
    expected = properties((embedded.folder / "secrets" / "spark.conf").read_text())
    actual = properties((COMPOSE / "spark.conf").read_text())
    assert expected.keys() - actual.keys() == {"spark.driver.memory", "spark.connect.authenticate.token"}
    folders = {"spark.local.dir", "spark.sql.warehouse.dir"}
    assert {k: v for k, v in actual.items() if k not in folders} == {k: expected[k] for k in actual if k not in folders}


def test_spark_and_its_users_share_a_loopback() -> None:
    """Spark listens on a loopback that it shares with tasks and command line only; so they can send the token."""
    together = {name for name, service in SERVICES.items() if service.get("network_mode") == "service:loopback"}
    assert together == {"spark", "airflow-scheduler", *COMMAND_LINES}
    assert not SERVICES["loopback"].get("ports")
    assert all("spark_token" in SERVICES[name]["secrets"] for name in together)


def test_committing_services_keep_the_witness_outside_the_database() -> None:
    folder = "/var/lib/tidegate/witness"
    mounts = {name: [str(v) for v in service.get("volumes", [])] for name, service in SERVICES.items()}
    assert {name for name, volumes in mounts.items() if f"witness:{folder}" in volumes} == {
        *(*AIRFLOW, "tidegate-migrate"),
        *COMMAND_LINES,
    }
    assert all(given(name)["TIDEGATE_WITNESS_FOLDER"] == folder for name in mounts if f"witness:{folder}" in mounts[name])
    assert "witness" in STACK["volumes"]
    made = (COMPOSE / "Dockerfile").read_text()
    assert folder in made[made.index("install --directory --owner tidegate") :]  # or the volume would be root's


# -- safe by default ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("security:other-machines")
def test_ports_are_the_usual_ones_on_loopback_only() -> None:
    published = {name: [port.split(":") for port in service.get("ports", [])] for name, service in SERVICES.items()}
    assert {(name, address, port) for name, ports in published.items() for address, port, _ in ports} == {
        ("postgres", "127.0.0.1", str(USUAL_PORTS["postgres"])),
        ("airflow-api-server", "127.0.0.1", str(USUAL_PORTS["airflow"])),
        ("kafka", "127.0.0.1", str(USUAL_PORTS["kafka"])),
    }
    assert published["postgres"][0][2] == given("spark")["PGPORT"]
    assert published["airflow-api-server"][0][2] == given("airflow-api-server")["AIRFLOW__API__PORT"]


def test_images_are_pinned() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    images = {service["image"] for service in SERVICES.values() if not service["image"].startswith("postgres:")}
    assert images == {f"apache/kafka:{VERSION}", f"tidegate:{project}"}
    assert re.fullmatch(r"postgres:\d+\.\d+(-\w+)?", SERVICES["postgres"]["image"])
    (base,) = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)


def test_airflow_starts_after_both_migrations() -> None:
    for name in AIRFLOW:
        conditions = {other: how["condition"] for other, how in SERVICES[name]["depends_on"].items()}
        assert conditions["airflow-migrate"] == conditions["tidegate-migrate"] == "service_completed_successfully"
    assert SERVICES["airflow-scheduler"]["depends_on"]["spark"]["condition"] == "service_healthy"


def test_role_passwords_go_only_to_the_services_that_use_them() -> None:
    users = {
        role: {name for name, service in SERVICES.items() if f"postgres_{role}" in service.get("secrets", [])} - {"postgres"}
        for role in (ADMINISTRATOR, *ROLES)
    }
    assert users == {
        ADMINISTRATOR: set(),
        "tidegate_owner": {"tidegate-migrate", "tidegate-owner"},  # the latter for a redo, which changes rows by hand
        "tidegate": {*AIRFLOW, *COMMAND_LINES},  # the api-server for what operators do on the page
        "tidegate_stager": {"spark"},
        "tidegate_reader": {"airflow-api-server", *COMMAND_LINES},  # for the page and its metrics; for queries
        "airflow": {*AIRFLOW, "airflow-migrate", "airflow-history"},
    }


def test_no_value_is_a_secret() -> None:
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|SECRET|TOKEN|KEY|PASSFILE", name):
                assert re.fullmatch(r"(cat )?/run/(secrets|tidegate)/\w+(\.json)?", value), name
    assert not re.search(r"://[^/@\s]+:[^/@\s]+@", (PROJECT / "docker-compose.yml").read_text())


# -- scripts -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    folder = tmp_path / "secrets"
    subprocess.run([COMPOSE / "secrets.sh", folder], check=True, capture_output=True)
    return folder


def test_secrets_are_declared_used_random_closed_and_kept(secrets: Path) -> None:
    used = set(itertools.chain.from_iterable(service.get("secrets", []) for service in SERVICES.values()))
    before = {file.name: file.read_text() for file in secrets.iterdir()}
    assert before.keys() == STACK["secrets"].keys() == used
    assert {Path(secret["file"]) for secret in STACK["secrets"].values()} == {Path("compose/secrets") / name for name in used}
    assert "secrets/" in (COMPOSE / ".gitignore").read_text().splitlines()
    again = subprocess.run([COMPOSE / "secrets.sh", secrets], check=True, capture_output=True, text=True)
    assert {file.name: file.read_text() for file in secrets.iterdir()} == before
    assert secrets.stat().st_mode & 0o777 == 0o700
    assert len(set(before.values())) == len(before)
    assert all(re.fullmatch(r"[\w=-]{24,}", value) for value in before.values())
    assert not any(value in again.stdout + again.stderr for value in before.values())


def enter(service: str, secrets: Path, run_folder: Path, *command: str) -> Path:
    """Run the image's entry point here, with a service's secrets and environment; return its private folder."""
    mounted = run_folder / "mounted"
    mounted.mkdir(parents=True)
    for name in SERVICES[service]["secrets"]:
        shutil.copy(secrets / name, mounted)
    script = (COMPOSE / "entrypoint.sh").read_text()
    for place, here in {"/run/secrets": mounted, "/run/tidegate": run_folder, IMAGE_FOLDER: PROJECT}.items():
        script = script.replace(place, str(here))
    environment = {**given(service), "PATH": os.defpath, "PGPASSFILE": str(run_folder / "pgpass")}
    environment |= {"XDG_CACHE_HOME": str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"))}
    subprocess.run(["sh", "-c", script, "entrypoint.sh", *command], env=environment, check=True)
    return run_folder


def test_a_service_starts_with_its_own_secrets_only(secrets: Path, tmp_path: Path) -> None:
    folder = enter("airflow-api-server", secrets, tmp_path / "api", "sh", "-c", "echo $$ > ${PGPASSFILE%pgpass}said")
    assert (folder / "said").read_text().strip().isdigit()
    roles = ("airflow", "tidegate", "tidegate_reader")
    expected = [f"postgres:5432:*:{role}:{(secrets / f'postgres_{role}').read_text()}" for role in roles]
    assert (folder / "pgpass").read_text().splitlines() == expected
    assert (folder / "metrics_token").read_text() == (secrets / "metrics_token").read_text()
    assert json.loads((folder / "airflow_passwords.json").read_text()) == {"admin": (secrets / "airflow_password").read_text()}
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir() if file.is_file()} == {0o600}


def test_spark_starts_with_its_token(secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (binaries := tmp_path / "bin").mkdir()
    (binaries / "spark-submit").symlink_to("/bin/true")
    (binaries / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (binaries / "python").chmod(0o755)
    monkeypatch.setattr(os, "defpath", f"{binaries}:{os.defpath}")
    folder = enter("spark", secrets, tmp_path / "run", *SERVICES["spark"]["command"])
    token = (secrets / "spark_token").read_text()
    expected = f"{(COMPOSE / 'spark.conf').read_text()}spark.connect.authenticate.token {token}\n"
    assert (folder / "spark.conf").read_text() == expected
    assert (secrets / "kafka_tidegate_password").read_text() in (folder / "kafka.properties").read_text()
    assert (folder / "spark.conf").stat().st_mode & 0o777 == 0o600


@pytest.mark.soak
def test_the_broker_starts_with_its_secrets(secrets: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    fetch_kafka()
    run, binaries, data = tmp_path / "run", tmp_path / "bin", tmp_path / "data"
    for folder in (run, binaries, data):
        folder.mkdir()
    (logging := tmp_path / "log4j2.properties").write_text(LOGGING)
    java = f"java -Xmx{HEAP_MEGABYTES}m -Dlog4j2.configurationFile={logging.as_uri()}"
    for name, main in {"kafka-storage.sh": "kafka.tools.StorageTool", "kafka-server-start.sh": "kafka.Kafka"}.items():
        (binaries / name).write_text(f"#!/bin/sh\nexec {java} -cp '{java_libraries.folder(PACKAGES)}/*' {main} \"$@\"\n")
        (binaries / name).chmod(0o755)
    ports = {port: str(free_port()) for port in ("19092", "9092", "9093")}
    properties = re.sub(r"\b(19092|9092|9093)\b", lambda found: ports[found[0]], (COMPOSE / "kafka.properties").read_text())
    properties = properties.replace("0.0.0.0", "127.0.0.1").replace("/var/lib/kafka/data", str(data))
    (tmp_path / "kafka.properties").write_text(properties)
    script = (COMPOSE / "kafka.sh").read_text()
    places = {"/run/secrets": secrets, "/run/tidegate": run, "/opt/kafka/bin": binaries, "/var/lib/kafka/data": data}
    for place, here in {**places, "/etc/tidegate": tmp_path}.items():
        script = script.replace(place, str(here))
    password = (secrets / "kafka_tidegate_password").read_text()
    (tmp_path / "login").write_text(
        f"security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-256\nsasl.username=tidegate\nsasl.password={password}\n"
    )
    login = kafka_client(Settings(kafka_bootstrap=f"127.0.0.1:{ports['19092']}", kafka_properties_file=tmp_path / "login"))

    def brokers(**change: str) -> int:
        try:
            return len(AdminClient({**login, **change, "log_level": 0}).list_topics(timeout=3).brokers)
        except KafkaException:
            return 0

    log = tmp_path / "log"
    for _ in range(2):
        with log.open("a") as output:
            process = subprocess.Popen(["sh", "-c", script, "kafka.sh"], stdout=output, stderr=subprocess.STDOUT)
        try:
            assert components.wait_until(lambda: brokers() == 1, 120), f"{process.poll()}: {log.read_text()}"
            assert brokers(**{"sasl.password": "wrong"}) == 0
            assert password not in " ".join(psutil.Process(process.pid).cmdline())
        finally:
            process.terminate()
            process.wait(60)
    assert "Kafka Server started" in log.read_text()
    assert password not in log.read_text()
    assert {file.name for file in run.iterdir()} == {"server.properties", "client.properties"}
    assert {file.stat().st_mode & 0o777 for file in run.iterdir()} == {0o600}


# -- roles -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[EmbeddedPostgres]:
    """A new cluster with only its administrator, as the image's entry point leaves it to the init script."""
    home = tmp_path_factory.mktemp("cluster")
    postgres = EmbeddedPostgres(home, free_port())
    postgres.initialize()
    component = postgres.component()
    process = components.start(component, home)
    try:
        assert components.wait_until(lambda: component.check() is None, component.deadline_seconds), component.check()
        yield postgres
    finally:
        process.send_signal(component.stop_signal)
        process.wait(30)
        postgres.delete()


@pytest.fixture(scope="module")
def team_server(cluster: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """The cluster after the init script, with the secrets that the script used."""
    secrets = tmp_path_factory.mktemp("team") / "secrets"
    subprocess.run([COMPOSE / "secrets.sh", secrets], check=True, capture_output=True)
    psql = [cluster.binaries / "psql", "-X", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1", "-p", str(cluster.port)]
    done = subprocess.run(
        [*psql, "-U", ADMINISTRATOR],
        input=(COMPOSE / "roles.sql").read_text().replace("/run/secrets", str(secrets)),
        env={"PGPASSFILE": str(cluster.passfile), "PATH": os.defpath},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    passfile = secrets.parent / "pgpass"
    lines = [f"127.0.0.1:*:*:{role}:{(secrets / f'postgres_{role}').read_text()}\n" for role in ROLES]
    passfile.touch(0o600)
    passfile.write_text("".join(lines))
    return Settings(pg_port=cluster.port, pg_passfile=passfile)


def connects(settings: Settings, role: str, database: str) -> bool:
    try:
        psycopg2.connect(**{**settings.conninfo(user=role), "dbname": database}).close()
    except psycopg2.OperationalError as error:
        assert "permission denied" in str(error), error
        return False
    return True


@pytest.mark.parametrize("part", ["scheduler", "metadatabase"])
def test_a_part_that_lives_without_a_heartbeat_is_started_again(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the embedded stack does it: after so long a silence its health check kills it, and its container starts again.

    Silence ends with a heartbeat, a page that does not answer, and the kill; the database's is not the api-server's.
    """
    healthy = run_path(str(COMPOSE / "healthy.py"))
    check, known = healthy["main"], healthy["main"].__globals__
    assert known["HUNG_AFTER_SECONDS"] == HUNG_AFTER_SECONDS
    marker, children, statuses = tmp_path / "silent", tmp_path / "children", {"metadatabase": {"status": "healthy"}}

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(statuses).encode())

    def look(status: str, *, silent_for: int | None = None) -> bool:
        statuses[part] = {"status": status}
        if silent_for is not None:
            os.utime(marker, (time.time() - silent_for,) * 2)
        with suppress(SystemExit):
            check(part)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
        return process.poll() is None

    with HTTPServer(("127.0.0.1", 0), Page) as server, subprocess.Popen(["sleep", "60"]) as process:
        children.write_text(f"{process.pid} 1 ")
        for name, value in {"SILENT_SINCE": marker, "OF_INIT": children}.items():
            monkeypatch.setitem(known, name, value)
        monkeypatch.setenv("TIDEGATE_AIRFLOW_URL", f"http://127.0.0.1:{server.server_port}")
        Thread(target=server.serve_forever, daemon=True).start()
        assert look("unhealthy")
        if part == "scheduler":
            assert look("unhealthy", silent_for=HUNG_AFTER_SECONDS - 60)
            assert look("healthy", silent_for=HUNG_AFTER_SECONDS + 60)
            assert look("unhealthy")
            assert not look("unhealthy", silent_for=HUNG_AFTER_SECONDS + 60)
        assert not marker.exists()
        process.kill()
        server.shutdown()


def test_roles_are_those_of_the_embedded_stack(team_server: Settings, cluster: EmbeddedPostgres) -> None:
    """Each gets into the databases that are its own; none may create roles or databases, replicate, or bypass row security."""
    databases = (*DATABASES, "postgres", "template1")
    assert {(role, database) for role in ROLES for database in databases if connects(team_server, role, database)} == {
        ("airflow", "airflow"),
        *((role, "tidegate") for role in ROLES if role != "airflow"),
    }
    connection = psycopg2.connect(
        host="127.0.0.1", port=cluster.port, user=ADMINISTRATOR, dbname="postgres", passfile=str(cluster.passfile)
    )
    powers = "rolsuper, rolcreaterole, rolcreatedb, rolreplication, rolbypassrls"
    weak = "SELECT 1 FROM pg_authid WHERE rolcanlogin AND coalesce(rolpassword, '') NOT LIKE 'SCRAM-SHA-256$%'"
    with connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT rolname, {powers} FROM pg_roles WHERE oid >= 16384")
        roles = {name: any(held) for name, *held in cursor.fetchall()}
        cursor.execute("SELECT datname, pg_get_userbyid(datdba) FROM pg_database WHERE oid >= 16384")
        owners = dict(cursor.fetchall())
        cursor.execute(weak)
        assert cursor.fetchall() == []
    connection.close()
    assert (roles, owners) == (dict.fromkeys(ROLES, False), DATABASES)
