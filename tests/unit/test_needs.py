"""The files in deploy/ agree with what components need."""

import re

import yaml

from tests.checkout import REPOSITORY
from tests.unit.test_compose import SERVICES, properties


def test_the_pod_is_closed_and_holds_no_secret() -> None:
    spec = yaml.safe_load((REPOSITORY / "deploy/worker-pod.yaml").read_text())["spec"]
    variables = properties((REPOSITORY / "deploy/kubernetes.env").read_text())
    (container,) = spec["containers"]
    assert container["name"] == "base"
    assert spec["securityContext"]["runAsNonRoot"]
    assert f"--uid {spec['securityContext']['runAsUser']} " in (REPOSITORY / "compose/Dockerfile").read_text()
    assert spec["automountServiceAccountToken"] is False
    limits = container["securityContext"]
    assert (limits["allowPrivilegeEscalation"], limits["readOnlyRootFilesystem"]) == (False, True)
    assert limits["capabilities"] == {"drop": ["ALL"]}
    assert [each["name"] for each in container["env"]] == ["AIRFLOW__CORE__EXECUTOR"]
    for name, value in variables.items():
        if re.search(r"PASSWORD|SECRET|TOKEN|KEY|PASSFILE", name):
            assert re.fullmatch(r"/run/(secrets|tidegate)/\w+", value), name
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in spec["volumes"]}
    entry = (REPOSITORY / "compose/entrypoint.sh").read_text()
    assert (mounts["secrets"] in entry, mounts["private"] in entry) == (True, True)
    (items,) = [volume["secret"]["items"] for volume in spec["volumes"] if "secret" in volume]
    assert {item["path"] for item in items} <= set(SERVICES["airflow-scheduler"]["secrets"])
    written = {variables["AIRFLOW_HOME"], variables["TIDEGATE_WITNESS_FOLDER"], f"{variables['TIDEGATE_HOME']}/.tidegate"}
    assert written <= set(mounts.values())
