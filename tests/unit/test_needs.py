"""What components need: one list, shown in the docs and checked by `tidegate doctor`; and the files in deploy/."""

import re

import yaml

from tidegate.stack.components.airflow import PROJECT

PAGE = PROJECT / "docs" / "airflow-workers.md"
DEPLOY = PROJECT / "deploy"
COMPOSE = yaml.safe_load((PROJECT / "docker-compose.yml").read_text())["services"]
POD = yaml.safe_load((DEPLOY / "worker-pod.yaml").read_text())


def variables(name: str) -> dict[str, str]:
    lines = (DEPLOY / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


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
