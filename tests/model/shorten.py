"""Shorten a history that disagrees, after Hypothesis has: leave out steps while it still does.

Hypothesis shrinks what it has drawn, from which the steps follow; here the steps themselves are left out, in ever smaller
pieces, and what no longer fits is passed over.
"""

import time
from collections.abc import Sequence
from typing import Any

from tests.model.actors import Call, Kinds
from tests.model.machine import Disagreement, StoreMachine

History = Sequence[tuple[Any, ...]]


def shorten(kinds: Kinds, steps: History, seconds: float) -> Disagreement | None:
    """Return the disagreement of the shortest history that was found in so many seconds; None if none disagreed again."""
    ends_at, best = time.monotonic() + seconds, disagreement(kinds, steps)
    if best is None:
        return None
    steps, length = StoreMachine.found[1], max(len(StoreMachine.found[1]) // 2, 1)
    while length and time.monotonic() < ends_at:
        start, is_shorter = 0, False
        while start < len(steps) and time.monotonic() < ends_at:
            found = disagreement(kinds, [*steps[:start], *steps[start + length :]])
            if found is not None and len(StoreMachine.found[1]) < len(steps):
                best, steps, is_shorter = found, StoreMachine.found[1], True
            else:
                start += length
        length = length if is_shorter and length == 1 else length // 2
    return best


def disagreement(kinds: Kinds, steps: History) -> Disagreement | None:
    """Run a history, without the steps that mean nothing in it any more; return how it disagrees, if it does."""
    machine = StoreMachine()
    machine.reset(kinds)
    for step in steps:
        calls = [part for part in step if isinstance(part, Call)]
        try:
            if all(_fits(machine, call) for call in calls):
                machine.run(*step) if len(calls) == 1 else machine.run_both(*step)
        except Disagreement as found:
            return found
    return None


def _fits(machine: StoreMachine, call: Call) -> bool:
    """Return whether there is what a step is about."""
    given = call.arguments
    if "number" in given and call.step != "mend":
        handle = (given["txid"], given["number"], given.get("history", 0))
        if call.step in ("seal", "fail"):
            return handle in machine.known and machine.may_end(call.step, handle)
        return handle in machine.known and handle[2] == machine.world.history
    if call.step == "restore":
        given["marked"] = machine.actors.marked()
        return machine.world.copy is not None
    return given.get("txid", 0) is None or given.get("txid", 0) <= len(machine.world.batches)
