"""Run the state machine for some minutes: `make prove BUDGET=minutes`, or `python -m tests.model.prove MINUTES [SEED]`.

It prints how many histories there were, and which steps, answers and faults they really had, how often; and, at the first
disagreement, the shrunk history and the seed. Then it ends with 1.
"""

import logging
import random
import sys
import time
from collections import Counter

from hypothesis import Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.database import running_actors
from tests.model.machine import HISTORIES, Disagreement, StoreMachine, TimeIsUp
from tests.model.shorten import shorten

HISTORIES_AT_ONCE = 200  # of one seed
STEPS = 30
SHORTENING_SECONDS = 120


def prove(minutes: float, first_seed: int) -> int:
    """Run histories for so long, or until one disagrees; return the exit code."""
    print(f"seed {first_seed}", flush=True)  # noqa: T201
    logging.getLogger("tidegate").setLevel(logging.ERROR)  # what the store warns of, the model expects
    with running_actors() as StoreMachine.actors:
        began = time.monotonic()
        number = first_seed
        StoreMachine.ends_at = began + 60 * minutes
        while True:
            machine = seed(number)(type("Machine", (StoreMachine,), {}))
            try:
                run_state_machine_as_test(machine, settings=_SETTINGS)
            except TimeIsUp:
                break
            except Disagreement as found:
                seconds = (StoreMachine.failed_at or 0) - began
                found = shorten(*StoreMachine.found, SHORTENING_SECONDS) or found
                print(f"\nA history disagrees, found after {seconds:.0f} s with seed {number}, shrunk:\n{found}")  # noqa: T201
                _report(StoreMachine.fired, time.monotonic() - began)
                return 1
            number += 1
        _report(StoreMachine.fired, time.monotonic() - began)
    return 0


_SETTINGS = settings(
    HISTORIES, max_examples=HISTORIES_AT_ONCE, stateful_step_count=STEPS, report_multiple_bugs=False, verbosity=Verbosity.quiet
)


def _report(fired: Counter[str], seconds: float) -> None:
    histories = max(fired["histories"], 1)
    print(f"\n{histories} histories in {seconds:.0f} s, {histories / seconds:.2f} per second; what happened in them:")  # noqa: T201
    for what, times in sorted(fired.items()):
        print(f"{times:8} {what}")  # noqa: T201


if __name__ == "__main__":
    sys.exit(prove(float(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else random.randrange(10**6)))
