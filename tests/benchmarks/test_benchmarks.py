"""The benchmarks work: what they print, draw and keep. How fast anything is, no test says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import Bar, compared, write_latest


@pytest.mark.parametrize(
    ("bar", "value", "holds"),
    [(Bar(at_least=1.5), 1.5, True), (Bar(at_least=1.5), 1.49, False), (Bar(at_most=1.1), 1.2, False)],
)
def test_a_bar_is_held_at_its_very_value(bar: Bar, value: float, holds: bool) -> None:
    """Bars are inclusive."""
    assert bar.holds(value) is holds


def test_the_latest_figure_of_each_name_is_kept(tmp_path: Path) -> None:
    """With its time and commit, in a line of the file."""
    file = tmp_path / "results" / "latest.json"
    other = compared("b", "other", [1.0], "peer", [2.0])
    write_latest([compared("b", "w", [9.0], "peer", [4.0]), other], file)
    write_latest([compared("b", "w", [1.0, 3.0], "peer", [4.0], bar=Bar(at_least=3))], file)
    kept, untouched = json.loads(file.read_text())
    assert (kept["what"], kept["ours"], kept["theirs"], kept["value"]) == ("w", 2.0, 4.0, 2.0)
    assert (kept["bar"], kept["verdict"], bool(kept["commit"])) == ("≥ 3", "falls short", True)
    assert untouched["what"] == "other"
    assert len(file.read_text().splitlines()) == 4


@pytest.mark.soak
def test_a_benchmark_runs_and_prints_its_table(tmp_path: Path) -> None:
    """The smallest of them, on a stack of its own; what it timed it has also checked."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--smoke", "--folder", tmp_path, "guard"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "COPY + upsert" in done.stdout
    assert "≤ 1.1" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
def test_an_unknown_benchmark_is_refused_with_those_there_are() -> None:
    """At once, as a usage error."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "speed"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "there is no speed; there are cardinality, kinds, guard" in done.stderr
