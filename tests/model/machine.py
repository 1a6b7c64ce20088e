"""The state machine: Hypothesis chooses steps and faults, the model predicts, the real store does, and both are compared.

Two actors at once are a step, too: the first is held before one of its statements, while the second runs until it ends or waits
for a lock. What the store then answers and holds has to be what one of the two orders gives. So examples have no races of their
own, and shrink.
"""

import json
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.model import invariants, operations
from tests.model.actors import ALL_KINDS, VERSIONS, Actors, Call, Did, Fault, Handle, Kinds, expected
from tests.model.core import World

# How histories are made, whoever says how many.
HISTORIES = settings(
    deadline=None, database=None, phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck)
)
MOST_RECORDS = 50  # the sum of their bits has to fit into a bigint
STATEMENTS = 25  # few steps have more


@dataclass(frozen=True)
class Aim:
    """A step before it is known what it is about: `at` is counted from the cursor, or back from the newest attempt."""

    step: str
    at: int = 0
    more: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        return f"Aim({self.step!r}, {self.at}{''.join(f', {name}={value!r}' for name, value in self.more)})"


NEWEST = st.just(0)


def aim(step: str, at: st.SearchStrategy[int] = NEWEST, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Aim]:
    """Return the strategy of a step's aims."""
    return st.builds(lambda at, values: Aim(step, at, tuple(values.items())), at, st.fixed_dictionaries(more))


SIZE = st.integers(0, 3)
SIZES = st.lists(SIZE, min_size=1, max_size=2).map(tuple)
NEXT = st.sampled_from([1, 1, 1, 2, 0, 3])  # the batch after the cursor, mostly
LAST = st.sampled_from([0, 0, 0, 1, -1])
PICK = st.sampled_from([0, 0, 0, 1, 2])  # of the attempts, mostly the newest
OTHER_ROWS = st.sampled_from([False, False, False, True])
FAULTS = st.one_of(
    st.none(),
    st.none(),
    st.sampled_from([Fault("cut before COMMIT"), Fault("cut after COMMIT")]),
    st.builds(Fault, st.just("dies"), st.integers(1, STATEMENTS)),
)
BATCH_STEPS = {"start", "commit", "skip", "redo", "give_up", "halt", "retry", "prune"}
ATTEMPT_STEPS = {"stage", "seal", "fail", "beat", "lose_staging", "fall_silent"}
CORE = [
    aim("plan", sizes=SIZES, takes_up=st.booleans()),
    aim("start", NEXT, mode=st.sampled_from(["resume", "restage", "first"]), size=SIZE),
    aim("start", LAST, mode=st.just("redo"), size=SIZE),
    aim("stage", PICK),
    aim("seal", PICK, other_rows=OTHER_ROWS),
    aim("fail", PICK, is_poison=st.booleans()),
    aim("beat", PICK),
    aim("commit", NEXT),
    aim("commit", st.just(1)),
    aim("commit_ready"),
    aim("skip", NEXT),
    aim("redo", LAST),
]
OUTSIDE = [
    aim("lose_staging", PICK, what=st.sampled_from(["table", "rows"])),
    aim("fall_silent", PICK),
]  # faults that are no process' own
# A history has some of these alone, so that they do not keep each other, and the core, from going on.
OPERATIONS = {
    "decisions": [aim("give_up", NEXT, tries=st.integers(1, 2)), aim("halt", NEXT), aim("retry", NEXT), aim("retry_all")],
    "pauses": [aim("pause"), aim("resume")],
    "retirement": [aim("retire"), aim("reinstate")],
    "declarations": [aim("deploy", version=st.sampled_from(VERSIONS)), aim("migrate")],
    "quarantine": [aim("mend", PICK), aim("replay", PICK), aim("replay_all")],
    "garbage": [aim("drop_old_staging"), aim("prune", LAST)],
    "copies": [aim("back_up"), aim("restore"), aim("accept")],
}
NOT_AT_ONCE = {"stage", "deploy", "back_up", "restore", "prune"}  # no statements of the store's own, or many transactions


class Disagreement(AssertionError):
    """The store does not do what the model says, or the model breaks an invariant; with the history that shows it."""


class TimeIsUp(KeyboardInterrupt):
    """No further history begins. Hypothesis passes such an interrupt on."""


class StoreMachine(RuleBasedStateMachine):
    """The real store beside the model. `actors` is set by who runs it; `fired` counts what has really happened."""

    actors: ClassVar[Actors]
    fired: ClassVar[Counter[str]] = Counter()
    failed_at: ClassVar[float | None] = None  # when the first history showed a disagreement
    ends_at: ClassVar[float] = float("inf")
    found: ClassVar[tuple[Kinds, list[tuple[Any, ...]]]]  # the last history that disagreed

    @initialize(
        kinds=st.sampled_from(ALL_KINDS),
        allowed=st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=3, unique=True),
        sizes=SIZES,
    )
    def begin(self, kinds: Kinds, allowed: list[str], sizes: tuple[int, ...]) -> None:
        """Begin with the plan of some batches in an empty ledger; operators will do only what is `allowed`."""
        if self.failed_at is None and time.monotonic() > self.ends_at:
            raise TimeIsUp
        self.reset(kinds)
        if "copies" in allowed:
            allowed = [name for name in allowed if name != "garbage"]  # dropped partitions do not come back with a copy
        self.operations = [each for name in sorted(allowed) for each in OPERATIONS[name]]
        self.fired["histories"] += 1
        self.try_to(Aim("plan", 0, (("sizes", sizes),)))

    def reset(self, kinds: Kinds) -> None:
        """Begin another history, in an empty ledger."""
        self.kinds = kinds
        self.world: World = operations.first_world(*kinds)
        self.known: list[Handle] = []  # attempts, in the order in which they began
        self.history = [f"{kinds}"]
        self.done: list[tuple[Any, ...]] = []  # the arguments of `run` or `run_both`, for a replay
        self.actors.begin(kinds)

    # One actor

    @rule(aim=st.one_of(*CORE), fault=FAULTS)
    def act(self, aim: Aim, fault: Fault | None) -> None:
        """Let a process run a step, whose connection may be cut around its COMMIT, or which may die before a statement."""
        self.try_to(aim, fault)

    @rule(aim=st.one_of(*OUTSIDE), commits=st.booleans())
    @precondition(lambda self: self.known)
    def strike(self, aim: Aim, commits: bool) -> None:
        """Let a fault strike that is no process' own, after which one may try to commit."""
        self.try_to(aim)
        if commits:
            self.try_to(Aim("commit", 1))

    @rule(data=st.data(), fault=FAULTS)
    @precondition(lambda self: self.operations)
    def operate(self, data: st.DataObject, fault: Fault | None) -> None:
        """Let an operator do something."""
        self.try_to(data.draw(st.one_of(*self.operations)), fault)

    @rule(sizes=SIZES)
    @precondition(lambda self: self.world.cursor == len(self.world.batches))
    def plan_more(self, sizes: tuple[int, ...]) -> None:
        """Plan, where nothing is left to do."""
        self.try_to(Aim("plan", 0, (("sizes", sizes),)))

    @rule(at=NEXT, mode=st.sampled_from(["resume", "restage"]), size=SIZE, other_rows=OTHER_ROWS)
    @precondition(lambda self: self.world.cursor < len(self.world.batches))
    def process(self, at: int, mode: str, size: int, other_rows: bool) -> None:
        """Begin an attempt, stage and seal it, if one begins; the source may give other rows than the last time."""
        self._process(Aim("start", at, (("mode", mode), ("size", size))), other_rows=other_rows)

    @rule(at=NEXT, mode=st.sampled_from(["restage", "resume", "first"]), size=SIZE, fault=FAULTS, commits=st.booleans())
    @precondition(lambda self: self.world.cursor < len(self.world.batches))
    def begin_attempt(self, at: int, mode: str, size: int, fault: Fault | None, commits: bool) -> None:
        """Begin an attempt, and leave it at that; meanwhile, another process may try to commit."""
        self.try_to(Aim("start", at, (("mode", mode), ("size", size))), fault)
        if commits:
            self.try_to(Aim("commit", at))

    @rule(at=PICK)
    @precondition(lambda self: self.known)
    def go_on(self, at: int) -> None:
        """Let the process of an attempt, which may be fenced by now, stage and seal."""
        self.try_to(Aim("stage", at))
        self.try_to(Aim("seal", at))

    @rule(at=NEXT, fault=FAULTS)
    @precondition(lambda self: self.world.cursor < len(self.world.batches))
    def commit(self, at: int, fault: Fault | None) -> None:
        """Commit a batch, or find that it may not be."""
        self.try_to(Aim("commit", at), fault)

    @rule(at=st.sampled_from([0, 0, 0, -1]), size=SIZE, again=st.booleans())
    @precondition(lambda self: self.world.cursor and self.world.states == "opaque")
    def redo(self, at: int, size: int, again: bool) -> None:
        """Compute the last committed batch, or one before, again, or rely on what was computed, and redo it."""
        if again:
            self._process(Aim("start", at, (("mode", "redo"), ("size", size))))
        self.try_to(Aim("redo", at))

    @rule(at=NEXT, is_poison=st.booleans(), then=st.sampled_from(["commit", "skip", None]))
    @precondition(lambda self: self.world.cursor < len(self.world.batches))
    def break_down(self, at: int, is_poison: bool, then: str | None) -> None:
        """Begin an attempt that fails; then one may try to commit, or an operator to skip, out of turn or not."""
        began = self.try_to(Aim("start", at, (("mode", "restage"),)))
        if began is not None and began.answer.startswith("attempt"):
            self.try_to(Aim("fail", 0, (("is_poison", is_poison),)))
            if then:
                self.try_to(Aim(then, at))

    @rule(at=NEXT, size=SIZE)
    @precondition(lambda self: self.world.cursor < len(self.world.batches))
    def give_up_sealed(self, at: int, size: int) -> None:
        """Process a batch that a person then halts, and decides to skip, out of turn or not."""
        self._process(Aim("start", at, (("mode", "resume"), ("size", size))))
        self.try_to(Aim("halt", at))
        self.try_to(Aim("skip", at))

    @rule(at=st.sampled_from([1, 1, 2]), size=SIZE, how=st.sampled_from([Aim("commit", 1), Aim("commit_ready")]))
    @precondition(lambda self: self.world.cursor < len(self.world.batches))
    def settle(self, at: int, size: int, how: Aim) -> None:
        """Process a batch, and commit the next, alone or with others."""
        self._process(Aim("start", at, (("mode", "resume"), ("size", size))))
        self.try_to(how)

    def _process(self, begins: Aim, *, other_rows: bool = False) -> None:
        began = self.try_to(begins)
        if began is not None and began.answer.startswith("attempt"):
            self.try_to(Aim("stage"))
            self.try_to(Aim("seal", 0, (("other_rows", other_rows),)))

    # Two actors

    @rule(data=st.data(), statement=st.integers(1, STATEMENTS))
    def at_once(self, data: st.DataObject, statement: int) -> None:
        """Hold one process before a statement until another one has ended its step, or waits for a lock."""
        held = self._drawn(data)
        other = held if held and data.draw(st.booleans()) else self._drawn(data)
        if held and other:
            self.run_both(held, statement, other)

    def _drawn(self, data: st.DataObject) -> Call | None:
        """Draw a step that has something to do here; None if none was found soon."""
        for _ in range(3):
            call = self.call(data.draw(st.one_of(*CORE, *self.operations)))
            if call and call.step not in NOT_AT_ONCE:
                return call
        return None

    def run_both(self, held: Call, statement: int, other: Call) -> None:
        """Run two steps, and go on in the world of the order that explains what they have answered and left."""
        self.done.append((held, statement, other))
        one, two = self.actors.interleave(held, statement, other)
        self.fired["steps"] += 2
        self.history.append(f"{held}, held before its statement {statement}: {one.answer}; meanwhile {other}: {two.answer}")
        self.fired["held before a statement"] += one.has_fired
        self.fired["waited for a lock"] += two.has_fired
        seen = self.actors.observe()
        explained = []
        for first, second, answers in ((held, other, (one, two)), (other, held, (two, one))):
            between, first_answer = apply(self.world, first)
            after, second_answer = apply(between, second)
            found = differences(after, seen)
            explained.append(f"{first}: {first_answer}, then {second}: {second_answer}\n{found}")
            if [first_answer, second_answer] == [did.answer for did in answers] and not found:
                self._note(held, one)
                self._note(other, two)
                self._go_on(after, {first.step, second.step})
                return
        raise self._disagreement("No order of the two explains it:\n" + "\n".join(explained))

    # What all rules do

    def call(self, aim: Aim) -> Call | None:
        """Return the step that an aim means in this world; None if it has none here."""
        more = dict(aim.more)
        if self._is_idle(aim.step):
            return None
        if aim.step in BATCH_STEPS:
            txid = self.world.cursor + aim.at
            return Call(aim.step, {"txid": txid, **more}) if 0 < txid <= len(self.world.batches) else None
        if aim.step in ATTEMPT_STEPS:
            return self._of_attempt(aim, more)
        if aim.step in ("mend", "replay"):
            return self._of_record(aim)
        if aim.step == "restore":
            return Call("restore", {"marked": self.actors.marked()})
        if aim.step == "plan" and sum(more["sizes"]) + self._end() > MOST_RECORDS:
            return None
        return Call(aim.step.removesuffix("_all"), more)

    def _is_idle(self, step: str) -> bool:
        """Return whether a step would find nothing to do, so that histories are not filled with such."""
        world = self.world
        has_a_use = {
            "pause": not world.is_paused,
            "resume": world.is_paused,
            "retire": not world.is_retired,
            "reinstate": world.is_retired,
            "migrate": world.code != world.version,
            "back_up": world.copy is None,
            "restore": world.copy is not None,
            "accept": world.is_lost,
            "replay_all": bool(world.aside),
            "drop_old_staging": world.cursor > 0,
            "redo": world.states == "opaque",
            "prune": world.records_changes,
        }
        return not has_a_use.get(step, True)

    def _of_attempt(self, aim: Aim, more: dict[str, Any]) -> Call | None:
        """An attempt that the ledger lacks, or that is of another history, can only try to end."""
        known = self.known
        if aim.step not in ("seal", "fail"):
            known = [at for at in known if at[2] == self.world.history and self._is_there(at)]
        else:
            known = [at for at in known if self.may_end(aim.step, at)]
        if aim.at >= len(known):
            return None
        txid, number, history = known[-1 - aim.at]
        return Call(aim.step, {"txid": txid, "number": number, **({"history": history} if history else {}), **more})

    def may_end(self, step: str, at: Handle) -> bool:
        """Return whether a process would seal or fail its attempt, which may be gone: it seals only what it has staged."""
        return step == "fail" or not self._is_there(at) or operations.attempt(self.world, *at[:2]).is_staged

    def _is_there(self, at: Handle) -> bool:
        return at[0] <= len(self.world.batches) and at[1] <= len(self.world.batches[at[0] - 1].attempts)

    def _of_record(self, aim: Aim) -> Call | None:
        if aim.at >= len(self.world.aside):
            return None
        record = self.world.aside[-1 - aim.at]
        return Call(aim.step, {"txid": record.txid} | ({"number": record.number} if aim.step == "mend" else {}))

    def _end(self) -> int:
        return max((a.input.end for b in self.world.batches for a in (b, *b.attempts)), default=0)

    def try_to(self, aim: Aim, fault: Fault | None = None) -> Did | None:
        """Run the step that an aim means, if any."""
        call = self.call(aim)
        return self.run(call, fault) if call else None

    def run(self, call: Call, fault: Fault | None = None) -> Did:
        """Run a step; compare its answer, and all that is there afterwards, with the model's."""
        self.done.append((call, fault))
        if call.step == "prune":
            fault = None  # it is several transactions
        after, answer = apply(self.world, call)
        did = self.actors.do(call, fault)
        how = ""
        if did.has_fired and fault is not None:
            after, answer = struck(self.world, after, answer, call, fault)
            self.fired[fault.kind] += 1
            how = f", {fault.kind}{f' before its statement {fault.statement}' if fault.statement else ''}"
        self.fired["steps"] += 1
        self.history.append(f"{call}{how}: {did.answer}")
        if did.answer != answer:
            raise self._disagreement(f"The model says: {answer}")
        if found := differences(after, self.actors.observe()):
            raise self._disagreement(found)
        self._note(call, did)
        self._go_on(after, {call.step})
        return did

    def _note(self, call: Call, did: Did) -> None:
        self.fired[f"{call.step}: {''.join(c for c in did.answer if c.isalpha() or c in ' _').strip()}"] += 1

    def _go_on(self, after: World, steps: set[str]) -> None:
        before, self.world = self.world, after
        try:
            if not steps & operations.LOSES_COMMITS:
                invariants.i2_atomicity(before, after)
                invariants.i6_metadata_once(before, after)
                invariants.i8_idempotence(before, after, "redo" if "redo" in steps else min(steps))
            for holds in invariants.OF_WORLDS:
                holds(after)
        except AssertionError as broken:
            raise self._disagreement(str(broken)) from None
        if "restore" in steps:  # where nothing is lost, numbers go on in the same history: the processes have ended
            self.known = [at for at in self.known if after.is_lost or self._is_there(at)]
        began = {(txid, n, after.history) for txid, b in enumerate(after.batches, 1) for n in range(1, len(b.attempts) + 1)}
        before_that = {(txid, n) for txid, b in enumerate(before.batches, 1) for n in range(1, len(b.attempts) + 1)}
        if "restore" not in steps:
            self.known += sorted(at for at in began if at[:2] not in before_that and self.actors.knows(at))

    def _disagreement(self, what: str) -> Disagreement:
        if StoreMachine.failed_at is None:
            StoreMachine.failed_at = time.monotonic()
        steps = "\n".join(f"{number:3} {step}" for number, step in enumerate(self.history))
        StoreMachine.found = self.kinds, list(self.done)
        return Disagreement(f"after {len(self.history) - 1} steps:\n{steps}\n{what}")


def apply(world: World, call: Call) -> tuple[World, str]:
    """Return what the model says of a step."""
    return getattr(operations, call.step)(world, **call.arguments)  # type: ignore[no-any-return]


def struck(before: World, after: World, answer: str, call: Call, fault: Fault) -> tuple[World, str]:
    """Return what the model says of a step that a fault has struck: all or nothing (I2); a commit is looked up (I10)."""
    if fault.kind == "dies":
        return before, "died"
    if fault.kind == "cut before COMMIT":
        return before, "STORE_UNAVAILABLE"
    if call.step == "commit":
        return after, f"already {answer}"
    return after, "STORE_UNAVAILABLE"


def differences(world: World, seen: dict[str, Any]) -> str:
    """Return in which parts the store differs from a world; nothing if it is the same."""
    said = json.loads(json.dumps(expected(world)))
    return "\n".join(
        f"{part}: the store has {seen.get(part)}\n{' ' * len(part)}  the model has {said[part]}"
        for part in said
        if said[part] != seen.get(part)
    )
