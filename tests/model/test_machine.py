"""A short run of the state machine, the same each time; `make prove` runs it for as long as one likes, with other seeds."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.actors import Actors
from tests.model.database import running_actors
from tests.model.machine import HISTORIES, StoreMachine

SEED = int(os.environ.get("MODEL_SEED", "1"))
EXAMPLES, STEPS = 60, 20


@pytest.fixture(scope="module")
def actors() -> Iterator[Actors]:
    """Actors on a real store."""
    with running_actors() as running:
        yield running


@pytest.mark.promise("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I10", "I12", "I13")
@pytest.mark.promise("fault:connection-breaks-before-answer-arrives:processing")
def test_the_store_does_what_the_model_says(actors: Actors, capsys: pytest.CaptureFixture[str]) -> None:
    """After each step: the same answer, and the same ledger and states, whatever fails or runs at once."""
    StoreMachine.actors = actors
    StoreMachine.fired.clear()
    machine = seed(SEED)(type("Machine", (StoreMachine,), {}))
    try:
        run_state_machine_as_test(machine, settings=settings(HISTORIES, max_examples=EXAMPLES, stateful_step_count=STEPS))
    finally:
        with capsys.disabled():
            print(f"\nseed {SEED} (MODEL_SEED): {StoreMachine.fired['histories']} histories")  # noqa: T201
    assert StoreMachine.fired["commit: committed"] > EXAMPLES / 4, "it does something"
