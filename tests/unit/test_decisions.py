"""What decides about batches and attempts is read where it is decided: any other file asks."""

import ast
from pathlib import Path

import pytest

from tests.checkout import REPOSITORY

STORE = REPOSITORY / "state_store"
# Where a column of the ledger decides something; where it is shown to people, or handed on to those. `plan` has a column of the
# name, too.
READERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sealed_at": (("verdicts", "attempts"), ("batch_search", "batch_timeline", "pipeline_facts", "tables", "trace_times")),
    "failed_at": (
        ("batch_turns", "verdicts", "recorded_actions", "redo_refusals", "attempts"),
        ("batch_search", "batch_timeline", "pipeline_facts", "plan_outcomes", "trace_times"),
    ),
    "seen_at": (("attempts",), ("batch_timeline", "pipeline_facts", "retirement", "wait_facts")),
    "halted_at": (("batch_turns", "verdicts", "batches", "stopped_batches", "recorded_actions"), ("batch_search",)),
    "skip_reason": (("begin_attempt", "batch_turns", "ordered_commit", "verdicts", "stopped_batches", "recorded_actions"),),
    "retired_at": (("batch_turns", "tables"), ("registration",)),
}


def reads(column: str, file: Path) -> bool:
    """Return whether a file names a column other than to declare or write it."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    written = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    names = (node for node in nodes if isinstance(node, ast.Attribute | ast.Constant) and node not in written)
    return any(getattr(node, "attr", getattr(node, "value", None)) == column for node in names)


@pytest.mark.parametrize("column", READERS)
def test_a_column_is_read_where_it_decides(column: str) -> None:
    assert sorted(file.stem for file in STORE.rglob("*.py") if reads(column, file)) == sorted(sum(READERS[column], ()))
