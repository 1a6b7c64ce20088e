"""The state machine: Hypothesis chooses steps and faults, the model predicts, the real store does, and both are compared.

Two actors at once are a step, too: the first is held before one of its statements, while the second runs until it ends or waits
for a lock. What the store then answers and holds has to be what one of the two orders gives. So examples have no races of their
own, and shrink.
"""

import json
import time
from collections import Counter
from typing import Any, ClassVar, NamedTuple

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.model import invariants
from tests.model.actors import FIRST_WORLDS, OF_ATTEMPTS, VERSIONS, Actors, Call, Did, Fault, Handle, expected
from tests.model.core import World, attempt
from tests.model.operations import LOSES_COMMITS, take

MOST_RECORDS = 50  # the sum of their bits has to fit into a bigint
STATEMENTS = 25  # few steps have more


# A step that was taken, with its fault, if any; or two, of which the first was held before its statement of that number.
Step = tuple[Call, Fault | None] | tuple[Call, int, Call]


class Aim(NamedTuple):
    """A step before it is known what it is about: `at` is counted from the cursor, or back from the newest attempt."""

    step: str
    at: int
    more: dict[str, Any]


NEWEST = st.just(0)


def aim(step: str, at: st.SearchStrategy[int] = NEWEST, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Aim]:
    return st.builds(Aim, st.just(step), at, st.fixed_dictionaries(more))


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
OF_BATCHES = {"start", "commit", "skip", "redo", "give_up", "halt", "retry", "prune"}
OF_RECORDS = {"mend": ("txid", "number"), "replay": ("txid",)}
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
# Faults that are no process' own.
OUTSIDE = [aim("lose_staging", PICK, what=st.sampled_from(["table", "rows"])), aim("fall_silent", PICK)]
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


is_planned = precondition(lambda self: self.world.cursor < len(self.world.batches))
is_begun = precondition(lambda self: self.known)


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
    found: ClassVar[tuple[World, list[Step]]]  # the last history that disagreed

    @initialize(
        first=st.sampled_from(FIRST_WORLDS),
        allowed=st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=3, unique=True),
        sizes=SIZES,
    )
    def begin(self, first: World, allowed: list[str], sizes: tuple[int, ...]) -> None:
        """Begin with the plan of some batches in an empty ledger; operators will do only what is `allowed`."""
        if self.failed_at is None and time.monotonic() > self.ends_at:
            raise TimeIsUp
        self.reset(first)
        if "copies" in allowed:
            allowed = [name for name in allowed if name != "garbage"]  # dropped partitions do not come back with a copy
        self.operations = [each for name in sorted(allowed) for each in OPERATIONS[name]]
        self.fired["histories"] += 1
        self.try_to("plan", sizes=sizes)

    def reset(self, first: World) -> None:
        """Go back to an empty ledger."""
        self.actors.begin(first)
        self.first = self.world = first
        self.history = [f"{first.source} source, {first.states} states"]
        self.known: list[Handle] = []  # attempts, in the order in which they began
        self.done: list[Step] = []

    # One actor

    @rule(aim=st.one_of(*CORE), fault=FAULTS)
    def act(self, aim: Aim, fault: Fault | None) -> None:
        """Let a process run a step, whose connection may be cut around its COMMIT, or which may die before a statement."""
        self.try_to(aim.step, aim.at, fault, **aim.more)

    @is_begun
    @rule(aim=st.one_of(*OUTSIDE), commits=st.booleans())
    def strike(self, aim: Aim, commits: bool) -> None:
        """Let a fault strike that is no process' own, after which one may try to commit."""
        self.try_to(aim.step, aim.at, **aim.more)
        if commits:
            self.try_to("commit", 1)

    @precondition(lambda self: self.operations)
    @rule(data=st.data(), fault=FAULTS)
    def operate(self, data: st.DataObject, fault: Fault | None) -> None:
        """Let an operator do something."""
        self.act(data.draw(st.one_of(*self.operations)), fault)

    @precondition(lambda self: self.world.cursor == len(self.world.batches))
    @rule(sizes=SIZES)
    def plan_more(self, sizes: tuple[int, ...]) -> None:
        """Plan, where nothing is left to do."""
        self.try_to("plan", sizes=sizes)

    @is_planned
    @rule(at=NEXT, mode=st.sampled_from(["resume", "restage"]), size=SIZE, other_rows=OTHER_ROWS)
    def process(self, at: int, mode: str, size: int, other_rows: bool) -> None:
        """Begin an attempt, stage and seal it, if one begins; the source may give other rows than the last time."""
        if self._begins(at, mode=mode, size=size):
            self.go_on(0, other_rows=other_rows)

    @is_planned
    @rule(at=NEXT, mode=st.sampled_from(["restage", "resume", "first"]), size=SIZE, fault=FAULTS, commits=st.booleans())
    def begin_attempt(self, at: int, mode: str, size: int, fault: Fault | None, commits: bool) -> None:
        """Begin an attempt, and leave it at that; meanwhile, another process may try to commit."""
        self._begins(at, fault, mode=mode, size=size)
        if commits:
            self.try_to("commit", at)

    @is_begun
    @rule(at=PICK)
    def go_on(self, at: int, *, other_rows: bool = False) -> None:
        """Let the process of an attempt, which may be fenced by now, stage and seal."""
        self.try_to("stage", at)
        self.try_to("seal", at, other_rows=other_rows)

    @is_planned
    @rule(at=NEXT, fault=FAULTS)
    def commit(self, at: int, fault: Fault | None) -> None:
        """Commit a batch, or find that it may not be."""
        self.try_to("commit", at, fault)

    @precondition(lambda self: self.world.cursor and self.world.states == "opaque")
    @rule(at=st.sampled_from([0, 0, 0, -1]), size=SIZE, again=st.booleans())
    def redo(self, at: int, size: int, again: bool) -> None:
        """Compute the last committed batch, or one before, again, or rely on what was computed, and redo it."""
        if again:
            self.process(at, "redo", size, other_rows=False)
        self.try_to("redo", at)

    @is_planned
    @rule(at=NEXT, is_poison=st.booleans(), then=st.sampled_from(["commit", "skip", None]))
    def break_down(self, at: int, is_poison: bool, then: str | None) -> None:
        """Begin an attempt that fails; then one may try to commit, or an operator to skip, out of turn or not."""
        if self._begins(at, mode="restage"):
            self.try_to("fail", is_poison=is_poison)
            if then:
                self.try_to(then, at)

    @is_planned
    @rule(at=NEXT, size=SIZE)
    def give_up_sealed(self, at: int, size: int) -> None:
        """Process a batch that a person then halts, and decides to skip, out of turn or not."""
        self.process(at, "resume", size, other_rows=False)
        self.try_to("halt", at)
        self.try_to("skip", at)

    @is_planned
    @rule(at=st.sampled_from([1, 1, 2]), size=SIZE, together=st.booleans())
    def settle(self, at: int, size: int, together: bool) -> None:
        """Process a batch, and commit the next, alone or with others."""
        self.process(at, "resume", size, other_rows=False)
        self.try_to("commit_ready") if together else self.try_to("commit", 1)

    def _begins(self, at: int, fault: Fault | None = None, **how: Any) -> bool:
        began = self.try_to("start", at, fault, **how)
        return began is not None and began.answer.startswith("attempt")

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
        seen, explained = self.actors.observe(), "No order of the two explains it:"
        for (first, did), (second, then) in (((held, one), (other, two)), ((other, two), (held, one))):
            between, first_answer = take(self.world, first.step, **first.arguments)
            after, second_answer = take(between, second.step, **second.arguments)
            found = differences(after, seen)
            explained += f"\n{first}: {first_answer}, then {second}: {second_answer}\n{found}"
            if (first_answer, second_answer) == (did.answer, then.answer) and not found:
                self._note(held, one)
                self._note(other, two)
                self._go_on(after, {first.step, second.step})
                return
        raise self._disagreement(explained)

    # What all rules do

    def call(self, aim: Aim) -> Call | None:
        """Return the step that an aim means in this world; None if it has none here, or would find nothing to do."""
        (step, at, more), world = aim, self.world
        if not self._has_use(step, more):
            return None
        subjects: dict[int, dict[str, Any]] = {at: {}}
        if step in OF_BATCHES:
            subjects = {txid - world.cursor: {"txid": txid} for txid in range(1, len(world.batches) + 1)}
        elif step in OF_ATTEMPTS:
            known = [dict(zip(("txid", "number", "history"), at, strict=True)) for at in self.known if self.may(step, at)]
            subjects = dict(enumerate(reversed(known)))
        elif step in OF_RECORDS:
            records = [{name: getattr(record, name) for name in OF_RECORDS[step]} for record in world.aside]
            subjects = dict(enumerate(reversed(records)))
        elif step == "restore":
            more = {"marked": self.actors.marked()}
        return Call(step.removesuffix("_all"), {**subjects[at], **more}) if at in subjects else None

    def _has_use(self, step: str, more: dict[str, Any]) -> bool:
        world = self.world
        end = max((own.input.end for batch in world.batches for own in (batch, *batch.attempts)), default=0)
        uses = {
            "plan": end + sum(more.get("sizes", ())) <= MOST_RECORDS,
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
        return uses.get(step, True)

    def may(self, step: str, at: Handle) -> bool:
        """Return whether a process takes a step with its attempt; one that is gone, or of another history, can only end."""
        if step not in ("seal", "fail"):
            return at[2] == self.world.history and self._is_there(at)
        return step == "fail" or not self._is_there(at) or attempt(self.world, *at[:2]).is_staged

    def _is_there(self, at: Handle) -> bool:
        return at[0] <= len(self.world.batches) and at[1] <= len(self.world.batches[at[0] - 1].attempts)

    def try_to(self, step: str, at: int = 0, fault: Fault | None = None, **more: Any) -> Did | None:
        """Run the step that an aim means, if any."""
        if (call := self.call(Aim(step, at, more))) is None:
            return None
        return self.run(call, None if step == "prune" else fault)  # which is several transactions

    def run(self, call: Call, fault: Fault | None) -> Did:
        """Run a step; compare its answer, and all that is there afterwards, with the model's."""
        self.done.append((call, fault))
        after, answer = take(self.world, call.step, **call.arguments)
        did, how = self.actors.do(call, fault), ""
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
            if not steps & LOSES_COMMITS:
                invariants.i2_atomicity(before, after)
                invariants.i6_metadata_once(before, after)
                invariants.i8_idempotence(before, after, "redo" if "redo" in steps else min(steps))
            for holds in invariants.OF_WORLDS:
                holds(after)
        except AssertionError as broken:
            raise self._disagreement(str(broken)) from None
        if "restore" in steps and not after.is_lost:  # numbers go on in the same history: the processes have ended
            for gone in [at for at in self.known if not self._is_there(at)]:
                del self.actors.begun[gone]
        self.known = [at for at in self.known if at in self.actors.begun]
        self.known += sorted(set(self.actors.begun) - set(self.known))

    def _disagreement(self, what: str) -> Disagreement:
        if StoreMachine.failed_at is None:
            StoreMachine.failed_at = time.monotonic()
        StoreMachine.found = self.first, list(self.done)
        steps = "\n".join(f"{number:3} {step}" for number, step in enumerate(self.history))
        return Disagreement(f"after {len(self.history) - 1} steps:\n{steps}\n{what}")


def struck(before: World, after: World, answer: str, call: Call, fault: Fault) -> tuple[World, str]:
    """Return what the model says of a step that a fault has struck: all or nothing (I2); a commit is looked up (I10)."""
    if fault.kind == "dies":
        return before, "died"
    if fault.kind == "cut before COMMIT":
        return before, "STORE_UNAVAILABLE"
    return after, f"already {answer}" if call.step == "commit" else "STORE_UNAVAILABLE"


def differences(world: World, seen: dict[str, Any]) -> str:
    """Return in which parts the store differs from a world; nothing if it is the same."""
    said = json.loads(json.dumps(expected(world)))
    return "\n".join(
        f"{part}: the store has {seen[part]}\n{' ' * len(part)}  the model has {said[part]}"
        for part in said
        if said[part] != seen[part]
    )


def run_histories(of_seed: int, histories: int, steps: int, **how: Any) -> None:
    """Run so many histories of so many steps each, the same for each seed."""
    machine = seed(of_seed)(type("Machine", (StoreMachine,), {}))
    phases, checks = (Phase.generate, Phase.shrink), list(HealthCheck)
    how |= {"deadline": None, "database": None, "phases": phases, "suppress_health_check": checks}
    run_state_machine_as_test(machine, settings=settings(max_examples=histories, stateful_step_count=steps, **how))
