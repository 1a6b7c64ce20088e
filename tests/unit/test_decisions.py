"""What decides about batches and attempts is read where it is decided: any other file asks."""

import ast
from pathlib import Path

import pytest

from tests.checkout import REPOSITORY

STORE = REPOSITORY / "state_store"
# Where a column of the ledger decides something.
TURNS, VERDICTS = "turns/batch_turns.py", "commit/verdicts.py"
ATTEMPTS, ACTIONS = "attempt/attempts.py", "operate/recorded_actions.py"
DECIDES = {
    "sealed_at": (VERDICTS, ATTEMPTS),
    "failed_at": (TURNS, VERDICTS, ACTIONS, "operate/redo_refusals.py", ATTEMPTS),
    "seen_at": (ATTEMPTS,),
    "halted_at": (TURNS, VERDICTS, "ledger/batches.py", ACTIONS),
    "skip_reason": ("turns/begin_attempt.py", TURNS, "commit/ordered_commit.py", VERDICTS, "ledger/batches.py", ACTIONS),
    "retired_at": (TURNS, "ledger/tables.py"),
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


def reads(column: str, file: Path) -> bool:
    """Return whether a file names a column other than to declare or write it."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    written = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    names = (node for node in nodes if isinstance(node, ast.Attribute | ast.Constant) and node not in written)
    return any(getattr(node, "attr", getattr(node, "value", None)) == column for node in names)


@pytest.mark.parametrize("column", DECIDES)
def test_a_column_is_read_where_it_decides(column: str) -> None:
    readers = {file.relative_to(STORE).as_posix() for file in STORE.rglob("*.py") if reads(column, file)}
    others = readers - set(DECIDES[column])
    assert set(DECIDES[column]) <= readers
    assert sorted(Path(path).stem for path in others) == sorted(PASSES_ON[column])
