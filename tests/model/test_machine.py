"""A short run of the state machine, the same each time; `make prove` runs it for as long as one likes, with other seeds."""

import os

import pytest

from tests.model.actors import running_actors
from tests.model.machine import StoreMachine, run_histories

SEED = int(os.environ.get("MODEL_SEED", "1"))
HISTORIES, STEPS = 60, 20


@pytest.mark.promise("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I10", "I12", "I13")
@pytest.mark.promise("fault:connection-breaks-before-answer-arrives:processing")
def test_the_store_does_what_the_model_says() -> None:
    """After each step: the same answer, and the same ledger and states, whatever fails or runs at once."""
    StoreMachine.fired.clear()
    with running_actors() as StoreMachine.actors:
        run_histories(SEED, HISTORIES, STEPS)
    assert StoreMachine.fired["commit: committed"] > HISTORIES / 4, "it does something"
