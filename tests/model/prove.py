"""Run the state machine for some minutes: `make prove BUDGET=minutes`, or `python -m tests.model.prove MINUTES [SEED]`.

It prints how many histories there were, and which steps, answers and faults they really had, how often; and, at the first
disagreement, the shrunk history and the seed. Then it ends with 1.
"""

import logging
import random
import sys
import time
from itertools import count

from hypothesis import Verbosity

from tests.model.actors import running_actors
from tests.model.machine import Disagreement, StoreMachine, TimeIsUp, run_histories
from tests.model.shorten import shorten

SHORTENING_SECONDS = 120


def prove(minutes: float, first_seed: int) -> int:
    """Run histories for so long, or until one disagrees; return the exit code."""
    print(f"seed {first_seed}", flush=True)  # noqa: T201
    logging.getLogger("tidegate").setLevel(logging.ERROR)  # what the store warns of, the model expects
    code, fired = 0, StoreMachine.fired
    with running_actors() as StoreMachine.actors:
        began = time.monotonic()
        StoreMachine.ends_at = began + 60 * minutes
        try:
            for number in count(first_seed):
                run_histories(number, 200, 30, report_multiple_bugs=False, verbosity=Verbosity.quiet)
        except TimeIsUp:
            pass
        except Disagreement as found:
            after = (StoreMachine.failed_at or 0) - began
            found = shorten(*StoreMachine.found, SHORTENING_SECONDS) or found
            print(f"\nA history disagrees, found after {after:.0f} s with seed {number}, shrunk:\n{found}")  # noqa: T201
            code = 1
        seconds = time.monotonic() - began
    print(f"\n{fired['histories']} histories in {seconds:.0f} s; what happened in them:")  # noqa: T201
    for what, times in sorted(fired.items()):
        print(f"{times:8} {what}")  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(prove(float(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else random.randrange(10**6)))
