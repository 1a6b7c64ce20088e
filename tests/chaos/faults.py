"""Faults that a kill, a stop or a cut can cause, by the rows of the fault table in docs/protocol.md.

A cell is a row and a phase. A fault at one connection counts in the phase of that; one that meets all that runs counts in
every phase that a task is in.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

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
# A moment comes within seconds if anything runs; if not, as while the stack restarts, another cell is tried.
PATIENCE_SECONDS = 12.0
MOST_PASSED_OVER = 6
LONGER_THAN_A_SILENCE_SECONDS = 65.0
SHARE_OF_LONG_STOPS = 0.1

Act = Callable[[StackUnderTest, Link, random.Random], Sequence[psutil.Process]]


@dataclass(frozen=True)
class Fault:
    """What is done to a connection in a trap, or to the whole stack at that moment: to the victims, or to the connection."""

    row: str
    victim: str
    how: str  # kill, stop or cut
    weight: float
    moments: tuple[Moment, ...] = MOMENTS
    role: str = TASK
    meets_all: bool = False  # every task that runs meets it, not only that of the connection

    def victims(self, stack: StackUnderTest, link: Link) -> Sequence[psutil.Process]:
        """Return the processes to kill or stop: none for a cut, or while the victim does not run."""
        match self.victim:
            case "connection":
                return []
            case "task" | "Python worker":
                return stack.client(link)
            case "Airflow's worker":  # the parent of the task: Airflow loses the task, which goes on
                of_scheduler = set(stack.component("airflow-scheduler")[:-1])  # an orphan has another parent
                return [parent for task in stack.client(link) if (parent := task.parent()) in of_scheduler]
            case "backend":
                return stack.backend(link)
            case "supervisor":
                return stack.component(self.victim, alone=True)
            case _:
                return stack.component(self.victim)


FAULTS = (
    Fault(DIES, "task", "kill", 6),
    Fault(STOPPED, "task", "stop", 2),
    Fault(WORKER, "Python worker", "kill", 3, ("statement", "COMMIT"), STAGER),
    Fault(TWICE, "Python worker", "kill", 3, ("answer",), STAGER),
    Fault(CUT_OFF, "connection", "cut", 1, MOMENTS, STAGER),
    Fault(SPARK, "spark", "kill", 0.5, MOMENTS, STAGER, meets_all=True),
    Fault(SPARK, "spark", "stop", 0.3, MOMENTS, STAGER, meets_all=True),
    Fault(AIRFLOW, "Airflow's worker", "kill", 0.5),
    Fault(AIRFLOW, "airflow-scheduler", "kill", 0.4, meets_all=True),
    Fault(AIRFLOW, "airflow-scheduler", "stop", 0.2, meets_all=True),
    Fault(AIRFLOW, "airflow-triggerer", "kill", 0.4, meets_all=True),
    Fault(AIRFLOW, "airflow-triggerer", "stop", 0.2, meets_all=True),
    Fault(AIRFLOW, "airflow-dag-processor", "kill", 0.3, meets_all=True),
    Fault(AIRFLOW, "airflow-dag-processor", "stop", 0.1, meets_all=True),
    Fault(AIRFLOW, "airflow-api-server", "kill", 0.3, meets_all=True),
    Fault(AIRFLOW, "airflow-api-server", "stop", 0.2, meets_all=True),
    Fault(AIRFLOW, "supervisor", "kill", 0.1),  # `up` then starts all again
    Fault(POSTGRES, "backend", "kill", 1.5, meets_all=True),  # the server then ends all others, and recovers
    Fault(POSTGRES, "postgres", "kill", 0.7, meets_all=True),
    Fault(BEFORE_COMMIT, "connection", "cut", 1, ("COMMIT",)),
    Fault(BEFORE_ANSWER, "connection", "cut", 1, ("answer",)),
)


@dataclass
class Tally:
    """What has been done so far, and when each cell was first reached, in seconds since the beginning."""

    began: float = field(default_factory=time.monotonic)
    cells: Counter[tuple[str, str]] = field(default_factory=Counter)
    reached: dict[tuple[str, str], float] = field(default_factory=dict)
    by_victim: Counter[tuple[str, str]] = field(default_factory=Counter)
    unanswered: Counter[str] = field(default_factory=Counter)  # kills between a COMMIT and its answer, by phase

    def seconds(self) -> float:
        """Return the time since the beginning."""
        return time.monotonic() - self.began

    def note(self, fault: Fault, phases: set[str], trap: Trap) -> None:
        """Count a fault in the listed cells that it has met."""
        self.by_victim[fault.how, fault.victim] += 1
        if fault.how == "kill" and trap.moment == "answer":
            self.unanswered[trap.phase] += 1
        for cell in [(fault.row, phase) for phase in phases if phase in CELLS[fault.row]]:
            self.cells[cell] += 1
            self.reached.setdefault(cell, self.seconds())

    def kills(self) -> int:
        """Return how many faults were a kill -9."""
        return sum(count for (how, _), count in self.by_victim.items() if how == "kill")

    def missing(self) -> list[tuple[str, str]]:
        """Return the listed cells that no fault has reached."""
        return [(row, phase) for row, phases in CELLS.items() for phase in phases if not self.cells[row, phase]]


class Chance:
    """Chooses what happens next, from a seed: what has happened least, where that is cheap, is the most likely."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def fault(self, tally: Tally) -> tuple[Fault, Trap]:
        """Return a fault and the moment for it."""
        chance = self.random
        options = [(fault, phase) for fault in FAULTS for phase in CELLS[fault.row]]
        weights = [
            fault.weight * (3 if phase == "commit" else 1) / (1 + tally.cells[fault.row, phase]) ** 0.5 for fault, phase in options
        ]
        ((fault, phase),) = chance.choices(options, weights)
        moment = chance.choice(fault.moments)
        is_raced = moment == "answer" and fault.row not in (BEFORE_ANSWER, TWICE) and chance.random() < 0.3
        return fault, Trap(phase, moment, fault.role, chance.randrange(MOST_PASSED_OVER), is_raced)

    def stop_seconds(self) -> float:
        """Return how long a stop lasts: mostly around the time that a transaction may be idle, sometimes beyond any silence."""
        if self.random.random() < SHARE_OF_LONG_STOPS:
            return LONGER_THAN_A_SILENCE_SECONDS
        return self.random.uniform(0.5, 2 * IDLE_TIMEOUT_SECONDS)


def strike(stack: StackUnderTest, chance: Chance, tally: Tally) -> str | None:
    """Wait for a moment, and do to the stack what chance wants; return what that was, or None if the moment did not come."""
    fault, trap = chance.fault(tally)
    link = stack.wire.catch(trap, PATIENCE_SECONDS)
    if link is None:
        return None
    is_lost = fault.how == "cut"
    try:
        victims = fault.victims(stack, link)
        phases = set() if fault.victim == "supervisor" else {trap.phase}
        if fault.meets_all and phases:
            phases |= stack.wire.phases()
        if not victims and fault.how != "cut":
            return None
        if fault.how == "stop":
            stack.stop(victims, chance.stop_seconds())
        elif fault.how == "kill":
            for victim in victims:
                with suppress(psutil.NoSuchProcess):
                    victim.kill()
            # What the process had sent may still arrive, or not; what a dead server has sent does not.
            is_lost = fault.row == POSTGRES or (fault.row == DIES and trap.moment != "answer" and chance.random.random() < 0.5)
    finally:
        trap.release(cut=is_lost)
    tally.note(fault, phases, trap)
    where = "between COMMIT and its answer" if trap.moment == "answer" else f"at a {trap.moment}"
    return f"{fault.how} {fault.victim} ({', '.join(str(victim.pid) for victim in victims[-1:]) or '-'}) in {trap.phase}, {where}"
