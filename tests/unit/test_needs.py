"""What components need: one list, shown in the docs, checked by `tidegate doctor`, and met by the files in deploy/."""

import re
from pathlib import Path

import yaml

from tidegate.doctor_checks import COMPONENTS, NEEDS, missing, needs_of, table
from tidegate.stack.components.airflow import PROJECT, airflow_settings
from tidegate.state_store import Settings

PAGE = PROJECT / "docs" / "airflow-workers.md"
DEPLOY = PROJECT / "deploy"
COMPOSE = yaml.safe_load((PROJECT / "docker-compose.yml").read_text())["services"]
POD = yaml.safe_load((DEPLOY / "worker-pod.yaml").read_text())


def variables(name: str) -> dict[str, str]:
    """Read a file of name=value lines."""
    lines = (DEPLOY / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


# -- the list ----------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_list() -> None:
    """Renew it with: python -c 'from tidegate.doctor_checks import table; print(table())'."""
    assert table() in PAGE.read_text(encoding="utf-8")


def test_each_component_needs_only_what_it_uses() -> None:
    """A triggerer needs no Spark, a scheduler no ledger and no source, an executor nothing of Airflow."""
    needed = {component: {need.name for need in needs_of(component)} for component in COMPONENTS}
    assert not needed["triggerer"] & {"Spark", "Sources", "Dag files"}
    assert not needed["scheduler"] & {"Ledger", "Spark", "Sources", "Witness"}
    assert needed["executor"] == {"Staging role", "Packages", "Kafka"}
    assert {"Ledger", "Spark", "Sources", "Airflow's API for tasks"} < needed["worker"]
    assert not needed["worker"] & {"Airflow's database", "Key of waits", "Key of tokens"}
    assert all(set(need.components) <= set(COMPONENTS) for need in NEEDS)


# -- the check ---------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_said_with_what_to_do_and_without_a_secret(tmp_path: Path) -> None:
    """Nothing listens, files are gone, and addresses hold passwords: every need of a scheduler with Celery is named once."""
    secret = "hunter2secret"
    environ = {
        "TIDEGATE_HOME": str(tmp_path / "nowhere"),
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2://airflow:{secret}@127.0.0.1:1/airflow",
        "AIRFLOW__CELERY__BROKER_URL_CMD": f"echo redis://:{secret}@127.0.0.1:1/0",
        "AIRFLOW__CORE__FERNET_KEY_CMD": "false",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://airflow:{secret}@127.0.0.1:1/execution/",
    }
    settings = Settings(home=tmp_path / "nowhere", pg_port=1, spark_remote="sc://127.0.0.1:1", pg_passfile=tmp_path / "none")

    found = {component: missing(component, settings, environ) for component in COMPONENTS}

    assert [(each.need, each.problem.split(":")[0]) for each in found["scheduler"]] == [
        ("Airflow's database", "Airflow's database does not answer"),
        ("Key of tokens", "AIRFLOW__API_AUTH__JWT_SECRET is not set"),
        ("Key of waits", "AIRFLOW__CORE__FERNET_KEY is not set"),
        ("Broker", "Nothing answers at 127.0.0.1"),
        (
            "Broker",
            "AIRFLOW__CELERY__RESULT_BACKEND is not set. Set it, or AIRFLOW__CELERY__RESULT_BACKEND_CMD, to the same in "
            "scheduler and workers.",
        ),
    ]
    lacking = {each.need for each in found["worker"]}
    assert {"Project folder", "Ledger", "Spark", "Sources", "Airflow's API for tasks", "Key of logs", "Dag files"} <= lacking
    assert all(each.problem.endswith((".", "up")) for several in found.values() for each in several)
    assert secret not in str(found)


# -- the files ---------------------------------------------------------------------------------------------------------


def test_celery_changes_nothing_but_the_executor_and_its_broker() -> None:
    """All other settings are the embedded stack's."""
    names = set(variables("celery.env"))
    assert all(name == "AIRFLOW__CORE__EXECUTOR" or name.startswith("AIRFLOW__CELERY") for name in names)
    assert names & set(airflow_settings()) == {"AIRFLOW__CORE__EXECUTOR"}


def test_the_pod_is_closed_and_holds_no_secret() -> None:
    """It runs as the image's user on a read-only root, and its secrets are mounted where the image expects them."""
    (container,) = POD["spec"]["containers"]
    dockerfile = (PROJECT / "compose" / "Dockerfile").read_text()
    entry = (PROJECT / "compose" / "entrypoint.sh").read_text()

    assert container["name"] == "base"
    assert POD["spec"]["securityContext"]["runAsNonRoot"]
    assert f"--uid {POD['spec']['securityContext']['runAsUser']} " in dockerfile
    assert POD["spec"]["automountServiceAccountToken"] is False
    limits = container["securityContext"]
    assert (limits["allowPrivilegeEscalation"], limits["readOnlyRootFilesystem"]) == (False, True)
    assert limits["capabilities"] == {"drop": ["ALL"]}
    assert [each["name"] for each in container["env"]] == ["AIRFLOW__CORE__EXECUTOR"]
    for name, value in variables("kubernetes.env").items():
        if re.search(r"PASSWORD|SECRET|TOKEN|KEY|PASSFILE", name):
            assert re.fullmatch(r"/run/(secrets|tidegate)/\w+", value), name
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in POD["spec"]["volumes"]}
    assert mounts["secrets"] in entry
    assert mounts["private"] in entry
    (items,) = [volume["secret"]["items"] for volume in POD["spec"]["volumes"] if "secret" in volume]
    assert {item["path"] for item in items} <= set(COMPOSE["airflow-scheduler"]["secrets"])
    written = {variables("kubernetes.env")[name] for name in ("AIRFLOW_HOME", "TIDEGATE_WITNESS_FOLDER")}
    assert {*written, f"{variables('kubernetes.env')['TIDEGATE_HOME']}/.tidegate"} <= set(mounts.values())
