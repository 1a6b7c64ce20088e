"""The law itself, before any code: every world that the core of the model reaches in a small scope."""

import pytest

from tests.model.scope import Scope, Walk


@pytest.mark.promise("I20")
@pytest.mark.parametrize(
    "scope",
    [
        Scope("transactional", "transactional", txids=3, faults=2),
        Scope("transactional", "opaque", txids=2, faults=2),
        Scope("opaque", "opaque", txids=2, faults=1),
    ],
    ids=str,
)
def test_every_reachable_world_keeps_the_invariants(scope: Scope) -> None:
    """Each world by itself and each move by what it changes (I1 to I8, I12, I14); and each can still commit all (I20)."""
    found = Walk(scope)
    print(f"{scope}: {len(found.scenes):,} worlds, {found.moves:,} moves, each visited")  # noqa: T201
    dead_ends = found.stuck()
    assert not dead_ends, f"I20: after {found.path(dead_ends[0])} nothing leads to the commit of all batches"
