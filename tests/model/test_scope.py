"""The law itself, before any code: every world that the core of the model reaches in a small scope."""

import pytest

from tests.model import scope


@pytest.mark.parametrize(
    ("source", "states"), [("transactional", "transactional"), ("transactional", "opaque"), ("opaque", "opaque")]
)
def test_every_reachable_world_keeps_the_invariants(source, states, capsys: pytest.CaptureFixture[str]) -> None:
    """Each world by itself and each move by what it changes (I1 to I8, I12 to I14); and each can still commit all (I20)."""
    found = scope.walk(source, states)
    with capsys.disabled():
        print(f"\n{source} source, {states} states: {len(found.scenes):,} worlds, {found.moves:,} moves, each visited")
    dead_ends = scope.stuck(found)
    assert not dead_ends, f"I20: after {found.path(dead_ends[0])} nothing leads to the commit of all batches"
