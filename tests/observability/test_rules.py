"""Alert rules, dashboard and documentation speak of metrics that exist, and each rule is tested by Prometheus' own tool."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import yaml

from tidegate.page.routes.metric_definitions import METRICS

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "tidegate" / "observability"
RULES_TEST = Path(__file__).with_name("alerts_test.yml")
RULES = yaml.safe_load((SHIPPED / "alerts.yml").read_text())["groups"][0]["rules"]
PANELS = json.loads((SHIPPED / "dashboard.json").read_text())["panels"]
ALERTS = (REPOSITORY / "docs" / "alerts.md").read_text()
METRICS_PAGE = (REPOSITORY / "docs" / "observability.md").read_text()
NEEDS_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing; install Debian's package prometheus"
)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Prometheus' own tool."""
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)


def expressions() -> Iterator[tuple[str, str]]:
    """Yield each expression of a rule and of a panel, with its place; the panels' variables are filled in."""
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m").replace("$pipeline", ".*")


def test_expressions_name_only_metrics_and_labels_that_exist() -> None:
    """A misspelt name would never match, and stay unnoticed."""
    known = {label for metric in METRICS.values() for label in metric.labels} | {"job", "instance"}
    wrong: list[tuple[str, set[str]]] = []
    for place, expression in expressions():
        unknown = set(re.findall(r"\btidegate_\w+", expression)) - set(METRICS)
        for labels in re.findall(r"(?:by|without|on) \(([\w, ]+)\)", expression):
            unknown |= set(labels.split(", ")) - known
        for name, matchers in re.findall(r"(tidegate_\w+)\{([^}]*)\}", expression):
            unknown |= set(re.findall(r"(\w+)(?:=~|=|!=|!~)", matchers)) - set(METRICS[name].labels)
        wrong += [(place, unknown)] * bool(unknown)
    assert wrong == []


@NEEDS_PROMTOOL
def test_every_expression_is_one_of_prometheus(tmp_path: Path) -> None:
    """Those of the panels too, as if they were rules."""
    rules = [{"record": f"r{number}", "expr": expression} for number, (_, expression) in enumerate(expressions())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))

    for file in (tmp_path / "rules.yml", SHIPPED / "alerts.yml"):
        done = promtool("check", "rules", file)
        assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_PROMTOOL
def test_the_shipped_configuration_is_valid(tmp_path: Path) -> None:
    """Beside the rules and a token, as the documentation says."""
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copy(SHIPPED / name, tmp_path)
    (tmp_path / "metrics_token").write_text("x" * 43)

    done = promtool("check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    settings = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    assert [job["job_name"] for job in settings["scrape_configs"]] == ["tidegate"]  # TidegateScrapeDown looks for it


@NEEDS_PROMTOOL
def test_every_alert_fires_in_its_case_and_none_in_a_quiet_hour() -> None:
    """The cases are in alerts_test.yml."""
    done = promtool("test", "rules", RULES_TEST)

    assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_PROMTOOL
def test_the_cases_notice_an_alert_that_never_fires(tmp_path: Path) -> None:
    """All at once: the output names each alert that a case expects in vain."""
    content = yaml.safe_load((SHIPPED / "alerts.yml").read_text())
    for rule in content["groups"][0]["rules"]:
        rule["expr"] = "vector(1) < 0"
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(content))
    cases = yaml.safe_load(RULES_TEST.read_text()) | {"rule_files": [str(tmp_path / "alerts.yml")]}
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases))
    done = promtool("test", "rules", tmp_path / "cases.yml")

    assert done.returncode == 1
    assert set(re.findall(r'alertname="(\w+)"', done.stdout + done.stderr)) == {rule["alert"] for rule in RULES}


def test_an_alert_says_what_it_is_what_to_run_and_where_to_read_on() -> None:
    """Its section in docs/alerts.md exists, and each section is of an alert."""
    for rule in RULES:
        name, annotations = rule["alert"], rule["annotations"]
        assert set(annotations) == {"summary", "description", "runbook"}, name
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert re.search(r"\btidegate (why|inspect|status|resume|quarantine)\b", annotations["description"]), name
        assert annotations["runbook"] == f"docs/alerts.md#{name.lower()}"
    assert re.findall(r"^### (\w+)", ALERTS, re.MULTILINE) == [rule["alert"] for rule in RULES]


def test_a_panel_has_a_unit_a_description_and_a_place_of_its_own() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        title, place = panel["title"], panel["gridPos"]
        assert panel["fieldConfig"]["defaults"]["unit"], title
        assert panel["description"].endswith("."), title
        assert panel["targets"], title
        for cell in product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])):
            assert taken.setdefault(cell, title) == title


def test_every_metric_is_on_the_dashboard_or_in_a_rule() -> None:
    """What is never looked at need not be exposed."""
    used = {name for _, expression in expressions() for name in re.findall(r"\btidegate_\w+", expression)}

    assert set(METRICS) - used == {"tidegate_opened_txid", "tidegate_build"}  # for those who look for them


def test_the_documentation_lists_every_metric() -> None:
    """With its labels; what each means stands in the answer."""
    rows = re.findall(r"^\| ([a-z, ]+) \| (`tidegate_.*) \|$", METRICS_PAGE, re.MULTILINE)

    described = {name: labels for labels, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert described == {name: ", ".join(metric.labels) or "none" for name, metric in METRICS.items()}
