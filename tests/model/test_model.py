"""The law itself, before any code, and a short run of the state machine; `make prove` runs that for as long as one likes."""

import gc
import os
from collections.abc import Iterator

import pytest

from tests.model.actors import running_actors
from tests.model.core import World
from tests.model.machine import StoreMachine, run_histories
from tests.model.scope import Walk

SEED = int(os.environ.get("MODEL_SEED", "1"))
HISTORIES, STEPS = 60, 20
SCOPES = [  # at most so many batches and faults
    (World("transactional", "transactional"), 3, 2),
    (World("transactional", "opaque"), 2, 2),
    (World("opaque", "opaque"), 2, 1),
]


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Do not look for cycles among very many worlds, which have none."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.promise("I20")
@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(("first", "txids", "faults"), SCOPES, ids=["transactional", "opaque states", "opaque"])
def test_every_reachable_world_keeps_the_invariants(first: World, txids: int, faults: int) -> None:
    """Each world by itself and each move by what it changes (I1 to I8, I12, I14); and each can still commit all (I20)."""
    found = Walk(first, txids, faults)
    print(f"{len(found.scenes):,} worlds, {found.moves:,} moves, each visited")  # noqa: T201
    dead_ends = found.stuck()
    assert not dead_ends, f"I20: after {found.path(dead_ends[0])} nothing leads to the commit of all batches"


@pytest.mark.promise("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I10", "I12", "I13")
@pytest.mark.promise("fault:connection-breaks-before-answer-arrives:processing")
def test_the_store_does_what_the_model_says() -> None:
    """After each step: the same answer, and the same ledger and states, whatever fails or runs at once."""
    StoreMachine.fired.clear()
    with running_actors() as StoreMachine.actors:
        run_histories(SEED, HISTORIES, STEPS)
    committed = StoreMachine.fired["commit: committed"] + StoreMachine.fired["commit_ready: committed"]
    assert committed > HISTORIES / 4, "it does something"
