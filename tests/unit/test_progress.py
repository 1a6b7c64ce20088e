"""The progress of a run: what the bars count, and that no width breaks them."""

import io
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from tidegate import output
from tidegate.status import run_progress


@dataclass
class SomeRun:
    pipeline: str = "flights"
    state: str = "running"
    txids: list[int] = field(default_factory=list)
    phases: dict[int, str] = field(default_factory=dict)


def test_the_bars_count_what_has_ended_each_phase() -> None:
    phases = {1: "committed", 2: "skipped", 3: "processed", 4: "processing", 5: "processing", 6: "halted", 7: "failed"}
    run = SomeRun(txids=[1, 2, 3, 4, 5, 6, 7, 8], phases=phases)
    assert run_progress.counts(run) == {
        "processed": (3, "2 processing: txids 4-5; txid 6 halted"),
        "committed": (2, "last txid 2"),
    }
    line = "flights: txid 1 committed; txid 2 skipped; txid 3 processed; txids 4-5 processing; txid 7 to be tried again; "
    assert run_progress.summary(run) == f"{line}txid 8 planned; txid 6 halted"


@pytest.mark.parametrize("columns", [20, 200])
def test_the_bars_fit_any_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=columns, highlight=False, color_system=None)
    monkeypatch.setattr(output, "talk", lambda: console)
    run = SomeRun(txids=list(range(1, 201, 2)))
    with run_progress.bars(run) as redraw:
        redraw()
        for txid in run.txids[:50]:
            run.phases[txid] = "committed"
            run.phases |= dict.fromkeys(run.txids[50:80], "processing")
            redraw()
    shown = written.getvalue().split("\x1b[2K")
    visible = "".join(shown).replace("\x1b[?25l", "").replace("\x1b[?25h", "").replace("\x1b[1A", "")
    assert max(len(line) for line in visible.replace("\r", "\n").splitlines()) <= columns
    if columns >= 60:
        assert "50/100" in visible
    assert ("30 processing: txids" in visible) == (columns >= 115)
