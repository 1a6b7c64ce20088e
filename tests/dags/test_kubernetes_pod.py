"""The pod of a task with KubernetesExecutor, as Airflow's own code renders it from our template. No cluster is needed."""

from datetime import UTC, datetime

import yaml
from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator
from kubernetes import client

from tests.dags.conftest import REPOSITORY

TEMPLATE = REPOSITORY / "deploy" / "worker-pod.yaml"
COMMAND = ["python", "-m", "airflow.sdk.execution_time.execute_workload", "--json-string", "{}"]


def test_kubernetes_knows_every_field_of_the_template() -> None:
    """Its client's classes drop an unknown or misspelt field, so the template would not survive the way there and back."""
    pod = PodGenerator.deserialize_model_file(str(TEMPLATE))

    assert client.ApiClient().sanitize_for_serialization(pod) == yaml.safe_load(TEMPLATE.read_text())


def test_airflow_fills_in_the_task_and_keeps_what_closes_the_pod() -> None:
    """Its arguments go to the image's entry point, which writes the password file first."""
    template = PodGenerator.deserialize_model_file(str(TEMPLATE))

    pod = PodGenerator.construct_pod(
        dag_id="flights",
        task_id="batch.process",
        pod_id="flights-batch-process-abc",
        try_number=1,
        kube_image="tidegate:0.1.0",
        date=datetime(2026, 1, 1, tzinfo=UTC),
        args=COMMAND,
        pod_override_object=None,
        base_worker_pod=template,
        namespace="tidegate",
        scheduler_job_id="1",
        run_id="manual",
        map_index=2,
    )

    rendered = client.ApiClient().sanitize_for_serialization(pod)
    (container,) = rendered["spec"]["containers"]
    (given,) = yaml.safe_load(TEMPLATE.read_text())["spec"]["containers"]
    assert container["args"] == COMMAND
    assert "command" not in container  # else the image's entry point would not run
    assert rendered["metadata"]["labels"]["map_index"] == "2"
    assert {name: container[name] for name in ("securityContext", "volumeMounts", "envFrom")} == {
        name: given[name] for name in ("securityContext", "volumeMounts", "envFrom")
    }
    assert given["env"][0] in container["env"]
