"""The team server: docker-compose.yml agrees with the embedded stack's own code, and its scripts, run here, work."""

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import psycopg2
import pytest
import yaml

from tidegate.stack.components import postgres
from tidegate.stack.components import server_process as components
from tidegate.stack.components.airflow import PROCESSES, PROJECT, airflow_settings
from tidegate.stack.components.postgres import ADMINISTRATOR, ROLES, EmbeddedPostgres
from tidegate.stack.layout import USUAL_PORTS, Layout

COMPOSE = PROJECT / "compose"
STACK = yaml.safe_load((PROJECT / "docker-compose.yml").read_text())
SERVICES = STACK["services"]
AIRFLOW = [f"airflow-{process}" for process in PROCESSES]
COMMAND_LINES = {"tidegate", "tidegate-owner"}


@pytest.fixture
def embedded(tmp_path: Path) -> Layout:
    """The embedded stack's layout with the usual ports; nothing of it runs."""
    (tmp_path / ".tidegate").mkdir(mode=0o711)
    (tmp_path / ".tidegate" / "stack.json").write_text(json.dumps({"ports": USUAL_PORTS}))
    return Layout.load(tmp_path)


def properties(text: str, separator: str | None = "=") -> dict[str, str]:
    return dict(line.split(separator, 1) for line in text.splitlines() if line and not line.startswith("#"))


def given(service: str) -> dict[str, str]:
    """Return the environment of a service without Kafka."""
    shared = [file for file in SERVICES[service].get("env_file", []) if isinstance(file, str)]  # others need not exist
    found = properties("\n".join((PROJECT / file).read_text() for file in shared)) | SERVICES[service].get("environment", {})
    return {name: re.sub(r"\$\{COMPOSE_PROFILES:\+[^}]*\}", "", value) for name, value in found.items()}


@pytest.mark.promise("performance:settings-of-embedded-server", "limit:MAX_SHARED_BUFFERS")
def test_postgres_has_the_embedded_options(embedded: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    def options(words: Sequence[str]) -> dict[str, str]:
        return dict(re.findall(r"-c ?(\w+)=(\S*)", " ".join(words)))

    expected, actual = options(embedded.postgres.component().command), options(SERVICES["postgres"]["command"])
    assert expected["shared_buffers"] == f"{min(psutil.virtual_memory().total // 4, 8 * 1024**3) // 1024}kB"
    monkeypatch.setattr(postgres, "MAX_SHARED_BUFFERS", 1024 * 1024)
    assert options(embedded.postgres.component().command)["shared_buffers"] == "1024kB"
    own = {"port", "listen_addresses", "unix_socket_directories", "max_parallel_workers_per_gather"}
    assert expected.keys() - actual.keys() == own
    shared = expected.keys() - own
    assert actual | {"shared_buffers": ""} == {name: expected[name] for name in shared} | {"shared_buffers": ""}


@pytest.mark.promise("performance:limits-of-airflow-are-raised-its-scheduler")
@pytest.mark.parametrize("service", [*AIRFLOW, "airflow-migrate", "airflow-history"])
def test_airflow_has_the_embedded_settings(service: str, embedded: Layout) -> None:
    actual = {name: value for name, value in given(service).items() if name.startswith(("AIRFLOW", "OTEL_"))}
    folder = f"{given(service)['TIDEGATE_HOME']}/dags"
    own = {"AIRFLOW__CORE__DAG_DISCOVERY_SAFE_MODE": "False", "AIRFLOW__CORE__DAGS_FOLDER": folder}
    assert actual | airflow_settings() | own == actual
    assert actual.keys() == {name for name in embedded.airflow.environment() if name.startswith(("AIRFLOW", "OTEL_"))}


@pytest.mark.promise("performance:spark-planner-is-compiled-late")
def test_spark_has_the_embedded_properties(embedded: Layout) -> None:
    embedded.spark.initialize()
    expected = properties((embedded.folder / "secrets" / "spark.conf").read_text(), None)
    actual = properties((COMPOSE / "spark.conf").read_text(), None)
    assert expected.keys() - actual.keys() == {"spark.driver.memory", "spark.connect.authenticate.token"}
    folders = {"spark.local.dir", "spark.sql.warehouse.dir"}
    assert {k: v for k, v in actual.items() if k not in folders} == {k: expected[k] for k in actual if k not in folders}


def test_committing_services_keep_the_witness_outside_the_database() -> None:
    folder = "/var/lib/tidegate/witness"
    keep = {name for name, service in SERVICES.items() if f"witness:{folder}" in map(str, service.get("volumes", []))}
    assert keep == {*AIRFLOW, "tidegate-migrate", *COMMAND_LINES}
    assert {given(name)["TIDEGATE_WITNESS_FOLDER"] for name in keep} == {folder}
    assert "witness" in STACK["volumes"]
    made = (COMPOSE / "Dockerfile").read_text()
    assert folder in made[made.index("install --directory --owner tidegate") :]  # or the volume would be root's


@pytest.mark.promise("security:other-machines")
def test_ports_are_the_usual_ones_on_loopback_only() -> None:
    found = {name: [port.split(":") for port in service.get("ports", [])] for name, service in SERVICES.items()}
    inside = {"postgres": given("spark")["PGPORT"], "airflow-api-server": given("airflow-api-server")["AIRFLOW__API__PORT"]}
    inside["kafka"] = found["kafka"][0][2]
    usual = {name: ["127.0.0.1", str(USUAL_PORTS[name.partition("-")[0]]), port] for name, port in inside.items()}
    assert {name: ports for name, ports in found.items() if ports} == {name: [port] for name, port in usual.items()}


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


def test_settings_of_the_server_outlive_a_shell() -> None:
    text = (PROJECT / "docker-compose.yml").read_text()
    assert "export " not in text
    assert ">> .env" in text
    assert "/.env" in (PROJECT / ".gitignore").read_text().splitlines()


def test_no_value_is_a_secret() -> None:
    values = [(name, value) for service in SERVICES.values() for name, value in service.get("environment", {}).items()]
    secret = [value for name, value in values if re.search(r"PASSWORD|SECRET|TOKEN|KEY|PASSFILE", name)]
    assert [each for each in secret if not re.fullmatch(r"(cat )?/run/(secrets|tidegate)/\w+(\.json)?", each)] == []
    assert not re.search(r"://[^/@\s]+:[^/@\s]+@", (PROJECT / "docker-compose.yml").read_text())


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


def test_a_service_starts_with_its_own_secrets_only(secrets: Path, tmp_path: Path) -> None:
    (mounted := tmp_path / "mounted").mkdir()
    for name in SERVICES["airflow-api-server"]["secrets"]:
        shutil.copy(secrets / name, mounted)
    script = (COMPOSE / "entrypoint.sh").read_text()
    script = script.replace("/run/secrets", str(mounted)).replace("/run/tidegate", str(tmp_path))
    environment = {**given("airflow-api-server"), "PATH": os.defpath, "PGPASSFILE": str(tmp_path / "pgpass")}
    subprocess.run(["sh", "-c", script, "entrypoint.sh", "true"], env=environment, check=True)
    roles = ("airflow", "tidegate", "tidegate_reader")
    expected = [f"postgres:5432:*:{role}:{(secrets / f'postgres_{role}').read_text()}" for role in roles]
    assert (tmp_path / "pgpass").read_text().splitlines() == expected
    assert (tmp_path / "metrics_token").read_text() == (secrets / "metrics_token").read_text()
    users = json.loads((tmp_path / "airflow_passwords.json").read_text())
    assert users == {"admin": (secrets / "airflow_password").read_text()}
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir() if file.is_file()} == {0o600}


def test_each_role_gets_into_its_own_database_only(secrets: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    cluster = EmbeddedPostgres(tmp_path / "stack", free_port())
    cluster.initialize()
    component, let_in = cluster.component(), set()
    process = components.start(component, tmp_path / "stack")
    try:
        assert components.wait_until(lambda: component.check() is None, component.deadline_seconds), component.check()
        place = ["-h", "127.0.0.1", "-p", str(cluster.port), "-U", ADMINISTRATOR]
        script = (COMPOSE / "roles.sql").read_text().replace("/run/secrets", str(secrets))
        command = [cluster.binaries / "psql", "-X", "-v", "ON_ERROR_STOP=1", *place]
        environment = {"PGPASSFILE": str(cluster.passfile), "PATH": os.defpath}
        subprocess.run(command, input=script, env=environment, capture_output=True, text=True, check=True)
        for role, database in itertools.product(ROLES, ("tidegate", "airflow", "postgres", "template1")):
            password = (secrets / f"postgres_{role}").read_text()
            try:
                psycopg2.connect(host="127.0.0.1", port=cluster.port, user=role, dbname=database, password=password).close()
                let_in.add((role, database))
            except psycopg2.OperationalError as error:
                assert "permission denied" in str(error), error
    finally:
        process.send_signal(component.stop_signal)
        process.wait(30)
        cluster.delete()
    assert let_in == {(role, "airflow" if role == "airflow" else "tidegate") for role in ROLES}
