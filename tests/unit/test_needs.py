"""What components need: one list, shown in the docs and checked by `tidegate doctor`; and the files in deploy/."""

import re
from pathlib import Path

import pytest
import yaml

from tidegate.doctor_checks import COMPONENTS, NEEDS, missing, needs_of
from tidegate.stack.components.airflow import PROJECT, airflow_settings
from tidegate.state_store import Settings

PAGE = PROJECT / "docs" / "airflow-workers.md"
DEPLOY = PROJECT / "deploy"
COMPOSE = yaml.safe_load((PROJECT / "docker-compose.yml").read_text())["services"]
POD = yaml.safe_load((DEPLOY / "worker-pod.yaml").read_text())


def variables(name: str) -> dict[str, str]:
    lines = (DEPLOY / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_the_page_shows_what_is_checked() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for need in NEEDS:
        settings = ", ".join(f"`{name}`" for name in need.settings)
        assert f"| {need.name} | {settings} | {need.purpose} | {', '.join(need.components)} |\n" in page
        assert set(need.components) <= set(COMPONENTS)


def test_each_component_needs_only_what_it_uses() -> None:
    needed = {component: {need.name for need in needs_of(component)} for component in COMPONENTS}
    assert needed["triggerer"] == {"Project folder", "Ledger"}
    assert needed["executor"] == {"Staging role", "Packages", "Kafka"}
    assert {"Ledger", "Spark", "Sources"} < needed["worker"]


def test_what_is_missing_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "nowhere"))
    servers = {"pg_port": 1, "spark_remote": "sc://127.0.0.1:1", "kafka_bootstrap": "127.0.0.1:1,b:2"}
    settings = Settings(home=tmp_path / "nowhere", pg_passfile=tmp_path / "none", **servers)  # type: ignore[arg-type]

    found = missing("worker", settings)

    assert {each.need for each in found} == {"Project folder", "Ledger", "Spark", "Sources", "Kafka"}
    assert "No broker answers at 127.0.0.1:1: " in str(found)
    assert all(each.problem.endswith((".", "up")) for each in found)


# -- the files ---------------------------------------------------------------------------------------------------------


def test_celery_changes_nothing_but_the_executor_and_its_broker() -> None:
    names = set(variables("celery.env"))
    assert all(name == "AIRFLOW__CORE__EXECUTOR" or name.startswith("AIRFLOW__CELERY") for name in names)
    assert names & set(airflow_settings()) == {"AIRFLOW__CORE__EXECUTOR"}


def test_the_pod_is_closed_and_holds_no_secret() -> None:
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
