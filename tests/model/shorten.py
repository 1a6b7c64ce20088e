"""Shorten a history that disagrees, after Hypothesis has: leave out steps while it still does.

Hypothesis shrinks what it has drawn, from which the steps follow; here the steps themselves are left out, in ever smaller
pieces, and what no longer fits is passed over.
"""

import time
from collections.abc import Sequence

from tests.model.actors import OF_ATTEMPTS, Call
from tests.model.core import World
from tests.model.machine import Disagreement, Step, StoreMachine


def shorten(first: World, steps: Sequence[Step], seconds: float) -> Disagreement | None:
    """Return the disagreement of the shortest history that was found in so many seconds; None if none disagreed again."""
    ends_at, best, length = time.monotonic() + seconds, _disagreement(first, steps), len(steps)
    while best and length and time.monotonic() < ends_at:
        steps, start, before = StoreMachine.found[1], 0, len(StoreMachine.found[1])
        while start < len(steps) and time.monotonic() < ends_at:
            found = _disagreement(first, [*steps[:start], *steps[start + length :]])
            if found is not None and len(StoreMachine.found[1]) < len(steps):
                best, steps = found, StoreMachine.found[1]
            else:
                StoreMachine.found = first, list(steps)
                start += length
        length = length if length == 1 and len(steps) < before else length // 2
    return best


def _disagreement(first: World, steps: Sequence[Step]) -> Disagreement | None:
    """Run a history, without the steps that mean nothing in it any more; return how it disagrees, if it does."""
    machine = StoreMachine()
    machine.reset(first)
    for step in steps:
        try:
            if all(_fits(machine, part) for part in step if isinstance(part, Call)):
                machine.run(*step) if len(step) == 2 else machine.run_both(*step)
        except Disagreement as found:
            return found
    return None


def _fits(machine: StoreMachine, call: Call) -> bool:
    """Return whether there is what a step is about."""
    given = call.arguments
    if call.step in OF_ATTEMPTS:
        handle = given["txid"], given["number"], given["history"]
        return handle in machine.known and machine.may(call.step, handle)
    if call.step == "restore":
        given["marked"] = machine.actors.marked()
        return machine.world.copy is not None
    return (given.get("txid") or 0) <= len(machine.world.batches)
