"""What decides about batches and attempts is read where it is decided: any other file asks."""

import ast
from pathlib import Path

import pytest

STORE = Path(__file__).resolve().parents[2] / "state_store"
# Where a column of the ledger decides something.
DECIDES = {
    "sealed_at": ("commit/verdicts.py", "seal/attempts.py"),
    "failed_at": (
        "attempt/turns.py",
        "commit/verdicts.py",
        "operate/recorded_actions.py",
        "operate/redo_refusals.py",
        "seal/attempts.py",
    ),
    "seen_at": ("seal/attempts.py",),
    "halted_at": ("attempt/turns.py", "commit/verdicts.py", "ledger/batches.py", "operate/recorded_actions.py"),
    "skip_reason": (
        "attempt/begin_attempt.py",
        "attempt/turns.py",
        "commit/ordered_commit.py",
        "commit/verdicts.py",
        "ledger/batches.py",
        "operate/recorded_actions.py",
    ),
    "retired_at": ("attempt/turns.py", "ledger/tables.py"),
}
# Where it is shown to people, or handed on to one of the files above; `plan` has a column of the name, too.
PASSES_ON = {
    "sealed_at": ("batch_search", "batch_timeline", "pipeline_facts", "tables", "trace_times"),
    "failed_at": ("batch_search", "batch_timeline", "pipeline_facts", "plan_outcomes", "trace_times"),
    "seen_at": ("batch_timeline", "pipeline_facts", "retirement", "wait_facts"),
    "halted_at": ("batch_search",),
    "skip_reason": (),
    "retired_at": ("registration",),
}


def lines_that_read(column: str, file: Path) -> list[int]:
    """Return where a file names a column other than to declare or write it."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    written = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    names = (node for node in nodes if getattr(node, "attr", getattr(node, "value", None)) == column and node not in written)
    return sorted(node.lineno for node in names if isinstance(node, ast.Attribute | ast.Constant))


@pytest.mark.parametrize("column", DECIDES)
def test_a_column_is_read_where_it_decides(column: str) -> None:
    readers = {file.relative_to(STORE).as_posix(): lines_that_read(column, file) for file in sorted(STORE.rglob("*.py"))}
    readers = {path: lines for path, lines in readers.items() if lines}
    known = {path for path in readers if path in DECIDES[column] or Path(path).stem in PASSES_ON[column]}
    assert {path: lines for path, lines in readers.items() if path not in known} == {}
    assert len(known) == len(DECIDES[column]) + len(PASSES_ON[column]), "a list names a file that does not read it any more"
