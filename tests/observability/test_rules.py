"""Alert rules and the dashboard speak of metrics that exist, and each rule is tested by Prometheus' own tool."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tidegate.page.routes.metric_definitions import METRICS

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "tidegate" / "observability"
RULES = yaml.safe_load((SHIPPED / "alerts.yml").read_text())["groups"][0]["rules"]
PANELS = json.loads((SHIPPED / "dashboard.json").read_text())["panels"]
ALERTS = (REPOSITORY / "docs" / "alerts.md").read_text()


def test_expressions_name_only_metrics_and_labels_that_exist() -> None:
    """A misspelt name would never match, and stay unnoticed."""
    known = {label for metric in METRICS.values() for label in metric.labels} | {"job", "instance"}
    wrong: list[tuple[str, set[str]]] = []
    expressions = [(rule["alert"], rule["expr"]) for rule in RULES]
    expressions += [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
    for place, expression in expressions:
        unknown = set(re.findall(r"\btidegate_\w+", expression)) - set(METRICS)
        for labels in re.findall(r"(?:by|without|on) \(([\w, ]+)\)", expression):
            unknown |= set(labels.split(", ")) - known
        for name, matchers in re.findall(r"(tidegate_\w+)\{([^}]*)\}", expression):
            unknown |= set(re.findall(r"(\w+)(?:=~|=|!=|!~)", matchers)) - set(METRICS[name].labels)
        wrong += [(place, unknown)] * bool(unknown)
    assert wrong == []
    assert re.findall(r"^### (\w+)", ALERTS, re.MULTILINE) == [rule["alert"] for rule in RULES]  # to which they lead


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing; install Debian's package prometheus")
def test_every_alert_fires_in_its_case_and_none_in_a_quiet_hour() -> None:
    cases = Path(__file__).with_name("alerts_test.yml")
    done = subprocess.run(["promtool", "test", "rules", cases], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
