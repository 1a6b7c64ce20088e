"""Faults that a kill, a stop or a cut can cause, by the rows of the fault table in docs/protocol.md.

A cell is a row and a phase. A fault at one connection counts in the phase of that; one that meets all that runs counts in
every phase that a task is in.
"""

import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import psutil

from tests.chaos.stack_under_test import IDLE_TIMEOUT_SECONDS, StackUnderTest
from tests.chaos.wire import MOMENTS, STAGER, TASK, Link, Moment, Trap

DIES, STOPPED = "process-dies-at-any-statement", "process-is-stopped-and-goes-on-later"
TWICE, WORKER = "spark-task-runs-twice-or-is-speculated", "spark-executor-or-worker-process-dies"
CUT_OFF, SPARK = "executor-does-not-reach-postgres-or-no", "spark-server-dies-or-hangs"
AIRFLOW, POSTGRES = "airflow-loses-repeats-or-reorders-tasks", "one-postgres-backend-or-server-dies"
BEFORE_COMMIT, BEFORE_ANSWER = "connection-breaks-before-commit-arrives", "connection-breaks-before-answer-arrives"
UNTIL_COMMIT = ("planning", "processing", "sealing", "commit")
CELLS: dict[str, tuple[str, ...]] = {
    DIES: (*UNTIL_COMMIT, "after"),
    STOPPED: UNTIL_COMMIT,
    TWICE: ("processing",),
    WORKER: ("processing",),
    CUT_OFF: ("processing",),
    SPARK: ("processing",),
    AIRFLOW: UNTIL_COMMIT,
    POSTGRES: UNTIL_COMMIT,
    BEFORE_COMMIT: UNTIL_COMMIT,
    BEFORE_ANSWER: UNTIL_COMMIT,
}
MEETS_ONE = ("connection", "task", "Python worker", "Airflow's worker")  # of the tasks that run; other victims meet all
OPTIONS = 16  # wait at once: some moments come once a minute
PATIENCE_SECONDS = 10.0
MOST_PASSED_OVER = 5
LONGER_THAN_A_SILENCE_SECONDS = 65.0
SHARE_OF_LONG_STOPS, SHARE_OF_RACES, SHARE_OF_LOST = 0.1, 0.3, 0.5


class Fault(NamedTuple):
    """What is done at a moment, and how likely that is beside others."""

    row: str
    how: Literal["kill", "stop", "cut"]
    victim: str
    weight: float
    moments: Sequence[Moment] = MOMENTS
    role: str = TASK

    def victims(self, stack: StackUnderTest, link: Link) -> Sequence[psutil.Process]:
        """Return the processes to kill or stop, given the connection in the trap; none while the victim does not run."""
        match self.victim:
            case "connection":
                return []
            case "task" | "Python worker":
                return stack.client(link)
            case "Airflow's worker":  # the parent of the task: Airflow loses the task, which goes on
                parents = [task.parent() for task in stack.client(link) if task.is_running()]
                return [each for each in stack.component("airflow-scheduler")[:-1] if each in parents]  # an orphan has another
            case "backend":
                return stack.backend(link)
            case "supervisor":
                return stack.component(self.victim)[-1:]
            case _:
                return stack.component(self.victim)


# The cheaper for the stack, the likelier: a killed supervisor costs a minute, until `up` has started all again.
FAULTS = (
    Fault(DIES, "kill", "task", 8),
    Fault(STOPPED, "stop", "task", 2),
    Fault(WORKER, "kill", "Python worker", 4, ("statement", "COMMIT"), STAGER),
    Fault(TWICE, "kill", "Python worker", 4, ("answer",), STAGER),
    Fault(CUT_OFF, "cut", "connection", 2, MOMENTS, STAGER),
    Fault(SPARK, "kill", "spark", 0.4, MOMENTS, STAGER),
    Fault(SPARK, "stop", "spark", 0.2, MOMENTS, STAGER),
    Fault(AIRFLOW, "kill", "Airflow's worker", 0.5),
    Fault(AIRFLOW, "kill", "airflow-scheduler", 0.2),
    Fault(AIRFLOW, "stop", "airflow-scheduler", 0.1),
    Fault(AIRFLOW, "kill", "airflow-triggerer", 0.2),
    Fault(AIRFLOW, "stop", "airflow-triggerer", 0.1),
    Fault(AIRFLOW, "kill", "airflow-dag-processor", 0.1),
    Fault(AIRFLOW, "stop", "airflow-dag-processor", 0.1),
    Fault(AIRFLOW, "kill", "airflow-api-server", 0.15),
    Fault(AIRFLOW, "stop", "airflow-api-server", 0.1),
    Fault(AIRFLOW, "kill", "supervisor", 0.05),
    Fault(POSTGRES, "kill", "backend", 0.8),  # the server then ends all others, and recovers
    Fault(POSTGRES, "kill", "postgres", 0.4),
    Fault(BEFORE_COMMIT, "cut", "connection", 2, ("COMMIT",)),
    Fault(BEFORE_ANSWER, "cut", "connection", 2, ("answer",)),
)
# The ordered commit is what everything is about; the others make up for how rarely a task is in them.
WEIGHTS = {"planning": 5, "processing": 1, "sealing": 2, "commit": 4, "after": 3}
OF_MOMENTS = {"statement": 1, "COMMIT": 2, "answer": 4}


@dataclass
class Tally:
    """How often each cell was reached so far."""

    began: float = field(default_factory=time.monotonic)
    cells: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def missing(self) -> list[str]:
        return [f"{row} in {phase}" for row, phases in CELLS.items() for phase in phases if not self.cells[row, phase]]


def choose(chance: random.Random, tally: Tally) -> tuple[Fault, Trap]:
    """Return a fault and a moment for it: cells that were reached less often are likelier."""
    options = [(fault, phase) for fault in FAULTS for phase in CELLS[fault.row]]
    weights = [fault.weight * WEIGHTS[phase] / (1 + tally.cells[fault.row, phase]) ** 0.5 for fault, phase in options]
    ((fault, phase),) = chance.choices(options, weights)
    (moment,) = chance.choices(fault.moments, [OF_MOMENTS[moment] for moment in fault.moments])
    needs_answer = fault.row in (BEFORE_ANSWER, TWICE)
    is_raced = moment == "answer" and not needs_answer and chance.random() < SHARE_OF_RACES
    passed_over = chance.randrange(MOST_PASSED_OVER) if moment == "statement" else 0
    return fault, Trap(phase, moment, fault.role, passed_over, is_raced)


def strike(stack: StackUnderTest, chance: random.Random, tally: Tally) -> str | None:
    """Do the one of some faults whose moment comes first; return what it was, or None if none came or the victim was gone."""
    options = [choose(chance, tally) for _ in range(OPTIONS)]
    caught = stack.wire.catch([trap for _, trap in options], PATIENCE_SECONDS)
    if caught is None or caught.link is None:
        return None
    fault, trap = next(option for option in options if option[1] is caught)
    try:
        phases = {trap.phase} if fault.victim in MEETS_ONE else {trap.phase, *stack.wire.phases()}
        victims = _hit(fault, stack, caught.link, chance)
        if fault.how == "cut" or (victims and _is_lost(fault, trap, chance)):
            caught.link.cut()
    finally:
        trap.released.set()
    if not victims and fault.how != "cut":
        return None
    if fault.victim != "supervisor":
        tally.cells.update((fault.row, phase) for phase in phases.intersection(CELLS[fault.row]))
    where = "between COMMIT and its answer" if trap.moment == "answer" else f"at a {trap.moment}"
    return f"{fault.how} {fault.victim}{''.join(f' {each.pid}' for each in victims[-1:])} in {trap.phase}, {where}"


def _is_lost(fault: Fault, trap: Trap, chance: random.Random) -> bool:
    """What a dead process had sent may still arrive, or not; what a dead server has sent does not."""
    may_be_lost = fault.row == DIES and trap.moment != "answer"
    return fault.row == POSTGRES or (may_be_lost and chance.random() < SHARE_OF_LOST)


def _hit(fault: Fault, stack: StackUnderTest, link: Link, chance: random.Random) -> list[psutil.Process]:
    hit = []
    for victim in fault.victims(stack, link):
        with suppress(psutil.NoSuchProcess):
            if fault.how == "kill":
                victim.kill()
            hit.append(victim)
    if fault.how == "stop":  # mostly for about as long as a transaction may be idle, sometimes beyond any silence
        is_long = chance.random() < SHARE_OF_LONG_STOPS
        stack.stop(hit, LONGER_THAN_A_SILENCE_SECONDS if is_long else chance.uniform(0.5, 2 * IDLE_TIMEOUT_SECONDS))
    return hit
