"""The core of the protocol in plain Python: from the plan of a batch to its commit, its redo, its skip, the loss of its rows.

A `World` is what the ledger and the states of one pipeline hold. Each step of `StateStore` is a function here: it takes a
world and returns the next one, and what the step answers: a word, or the code of the error that it raises. A step that is
refused changes nothing. Numbers such as I4 are rules of docs/protocol.md.

The source is a list of records, known by their positions; a batch reads the positions from `start` up to `end`. A row of the
state keeps the positions that have counted in it, so that one that is lost, or counts twice, shows.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

WINDOW = 2  # the batches that may be begun and not committed
TOGETHER = {"transactional": 100, "opaque": 1}  # the batches of one commit: opaque states keep what was before one

# What the ledger and the states hold


class Input(NamedTuple):
    """What a batch reads: positions of the source; or, after that position, `replayed` records that waited in quarantine."""

    start: int
    end: int
    replayed: int = 0


class Attempt(NamedTuple):
    """A try at a batch: what it reads, by which version of the code, how far it is; and what has happened to it."""

    input: Input
    continues: Input | None
    version: int
    phase: Literal["open", "sealed", "failed"] = "open"
    is_staged: bool = False
    is_silent: bool = False
    is_poison: bool = False
    good: tuple[int, ...] = ()  # the staged records that count, and those that are set aside
    bad: tuple[int, ...] = ()
    damage: Literal["", "rows", "table", "dropped"] = ""  # of its staging: dropped when its batch had committed long ago
    read_other_rows: bool = False  # whether the source gave it other ones than the planned ones


class Batch(NamedTuple):
    """A planned batch: its frozen input, the one that it continues, its attempts, whether it is halted or given up."""

    input: Input
    continues: Input | None
    attempts: tuple[Attempt, ...] = ()
    is_halted: bool = False
    is_given_up: bool = False
    tries_after: int = 0

    @property
    def newest(self) -> Attempt | None:
        """The attempt that owns the batch (I4)."""
        return self.attempts[-1] if self.attempts else None


class Commit(NamedTuple):
    """The record of a committed batch: its attempt, and whether it was skipped, so has no rows."""

    attempt: int
    is_skipped: bool = False


class Row(NamedTuple):
    """A row of the keyed state: what has counted, the last txid that changed it; of an opaque state, both as before that."""

    counted: tuple[int, ...]
    txid: int
    before: tuple[int, ...] | None = None
    txid_before: int | None = None


class Aside(NamedTuple):
    """A bad record in quarantine, by the txid and number that it has there; the txid that has taken it up; whether mended."""

    txid: int
    number: int
    position: int
    replayed_by: int | None = None
    is_mended: bool = False


class World(NamedTuple):
    """The ledger and the states of a pipeline with a source and states of these kinds; `version` is the registered one."""

    source: Literal["transactional", "opaque"]
    states: Literal["transactional", "opaque"]
    quarantines: bool = False
    records_changes: bool = False
    batches: tuple[Batch, ...] = ()
    commits: tuple[Commit, ...] = ()
    keyed: tuple[tuple[str, Row], ...] = ()
    log: frozenset[tuple[int, int]] = frozenset()  # of appended rows: txid and position
    aside: tuple[Aside, ...] = ()
    changes: frozenset[tuple[int, str, Row]] = frozenset()  # of the keyed state, if it records them: as each txid left a row
    version: int = 1  # of the declaration that is registered
    code: int = 1  # of the one that processes run
    # The rest is that of `tests.model.operations`, and stays in every step of the core.
    is_paused: bool = False
    is_retired: bool = False
    is_lost: bool = False  # whether the database lacks commits that its witness knows
    history: int = 0  # of commits: another one when a person accepts that some are lost; an attempt counts in its own alone
    histories: int = 0
    copy: "World | None" = None  # the older copy of the database that may be put back

    @property
    def cursor(self) -> int:
        """The last committed txid."""
        return len(self.commits)


Step = tuple[World, str]


class Refused(Exception):
    """A step changes nothing; the text is its answer."""


def refuse(answer: str | None, when: object = True) -> None:
    """Refuse a step with this answer, if there is one, when something holds."""
    if answer and when:
        raise Refused(answer)


def taken(law: Callable[..., Step], world: World, *of: Any, **how: Any) -> Step:
    """Return the next world and the answer, also of a step that is refused."""
    try:
        return law(world, *of, **how)
    except Refused as refused:
        return world, str(refused)


def attempt(world: World, txid: int, number: int) -> Attempt:
    return world.batches[txid - 1].attempts[number - 1]


def with_batch(world: World, txid: int, **changes: object) -> World:
    batch = world.batches[txid - 1]._replace(**changes)
    return world._replace(batches=(*world.batches[: txid - 1], batch, *world.batches[txid:]))


def with_attempt(world: World, txid: int, number: int, **changes: object) -> World:
    attempts = world.batches[txid - 1].attempts
    own = attempts[number - 1]._replace(**changes)
    return with_batch(world, txid, attempts=(*attempts[: number - 1], own, *attempts[number:]))


# What a batch reads


def key_of(position: int) -> str:
    return "abc"[position % 3]


def is_bad(position: int) -> bool:
    """Return whether a record belongs into quarantine."""
    return position % 5 == 4


def current(world: World, txid: int) -> Batch | Attempt:
    """Return what has a batch's current input: its committed attempt, else its newest, else its plan (I6, I12)."""
    batch = world.batches[txid - 1]
    number = world.commits[txid - 1].attempt if txid <= world.cursor else len(batch.attempts)
    return batch.attempts[number - 1] if number else batch


def input_before(world: World, txid: int) -> Input | None:
    """Return the input that a batch has to continue; None for the first batch."""
    return current(world, txid - 1).input if txid > 1 else None


def is_in_chain(world: World, txid: int) -> bool:
    """Return whether a batch continues the one before as that is now (I12)."""
    return current(world, txid).continues == input_before(world, txid)


def records(world: World, txid: int, source: Input) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the positions that count for a batch with this input, and the bad ones that are set aside."""
    if source.replayed:
        read = [(record.position, record.is_mended) for record in world.aside if record.replayed_by == txid]
    else:
        read = [(position, not (world.quarantines and is_bad(position))) for position in range(source.start, source.end)]
    return tuple(position for position, counts in read if counts), tuple(position for position, counts in read if not counts)


# Plan and process


def plan(world: World, sizes: tuple[int, ...], *, takes_up: bool = False) -> Step:
    """Freeze the inputs of new batches, one after another (I6), and lift the halts of the old ones that the run `takes_up`."""
    refuse("DECLARATION_CHANGED", sizes and world.code != world.version)
    covered = [*range(world.cursor + 1, len(world.batches) + 1)] if takes_up else []
    for txid in covered:
        world = with_batch(world, txid, is_halted=False)
    for size in sizes:
        covered.append(len(world.batches) + 1)
        last = input_before(world, covered[-1])
        start = last.end if last else 0
        world = world._replace(batches=(*world.batches, Batch(Input(start, start + size), last)))
    return world, f"opened {covered}"


def start(world: World, txid: int, mode: str = "resume", size: int = 1) -> Step:
    """Begin an attempt, which fences all older ones (I4); an opaque source chooses `size` records if it has to choose again."""
    refuse("UNKNOWN_BATCH", not 0 < txid <= len(world.batches))
    batch, read, is_as_planned = world.batches[txid - 1], current(world, txid).input, is_in_chain(world, txid)
    newest, before = batch.newest, input_before(world, txid)
    if mode == "redo":
        refuse("RANGE_REFUSED", not may_redo(world, txid))
        refuse("DECLARATION_CHANGED", world.code != world.version)
    else:
        refuse(committed_already(world, txid))
        refuse("DECLARATION_CHANGED", world.code != world.version)
        refuse("GIVEN_UP", batch.is_given_up and is_as_planned)
        refuse("SEALED", mode != "restage" and is_as_planned and newest and is_sealed(world, newest))
        refuse("BEGUN", mode == "first" and newest)
        refuse("PAUSED", world.is_paused and not newest)
        refuse("AHEAD", txid - world.cursor > WINDOW)
    if world.source == "opaque" and (newest or not is_as_planned):
        end = before.end if before else 0
        read = Input(before.start, end, read.replayed) if read.replayed and before else Input(end, end + size)
    attempts = (*ended(batch.attempts), Attempt(read, before, world.code))
    return with_batch(world, txid, attempts=attempts, is_halted=False, is_given_up=False), f"attempt {len(attempts)}"


def ended(attempts: tuple[Attempt, ...]) -> tuple[Attempt, ...]:
    return tuple(own._replace(phase="failed") if own.phase == "open" else own for own in attempts)


def is_sealed(world: World, own: Attempt) -> bool:
    """Return whether an attempt is sealed, and by the code that runs (I16)."""
    return (own.phase, own.version) == ("sealed", world.code)


def stage(world: World, txid: int, number: int) -> Step:
    """Write an attempt's rows into staging of its own, which fences do not keep it from (I5); again, if a task runs twice."""
    own = attempt(world, txid, number)
    refuse("UNPROCESSED", own.damage in ("table", "dropped"))
    if own.phase == "open":
        good, bad = records(world, txid, own.input)
        world = with_attempt(world, txid, number, is_staged=True, good=good, bad=bad, damage="")
    return world, "staged"


def seal(world: World, txid: int, number: int, *, other_rows: bool = False) -> Step:
    """Declare an attempt's staging complete, unless a newer one owns the batch (I4, I5) or the source gave other rows (I11)."""
    attempts, own = world.batches[txid - 1].attempts, attempt(world, txid, number)
    refuse("ATTEMPT_FENCED", number != len(attempts) or own.phase == "failed")
    refuse("sealed", own.phase == "sealed")
    sealed = own._replace(phase="sealed", read_other_rows=other_rows)
    same = [a for a in attempts if (a.input, a.version, a.phase) == (own.input, own.version, "sealed")]
    rows = [(sorted((*a.good, *a.bad)), a.read_other_rows) for a in (*same[:1], sealed)]
    refuse("SOURCE_CHANGED", world.source == "transactional" and rows[0] != rows[-1])
    return with_attempt(world, txid, number, **sealed._asdict()), "sealed"


def fail(world: World, txid: int, number: int, *, is_poison: bool = False) -> Step:
    """Record that an attempt has failed, unless it has ended or a newer one owns the batch (I5)."""
    refuse("ATTEMPT_FENCED", number != len(world.batches[txid - 1].attempts))
    if attempt(world, txid, number).phase == "open":
        world = with_attempt(world, txid, number, phase="failed", is_poison=is_poison)
    return world, f"{poison_tries(world.batches[txid - 1])} tries"


def poison_tries(batch: Batch) -> int:
    """Return how many attempts have failed by the batch's content since an operator chose to retry it."""
    return sum(a.is_poison for a in batch.attempts[batch.tries_after :])


# Commit


def commit(world: World, txid: int) -> Step:
    """Commit a batch in its turn (I3), once (I8), by its newest attempt (I4), all of whose sealed rows are there (I7)."""
    refuse(committed_already(world, txid))
    refuse("COMMIT_OUT_OF_ORDER", txid != world.cursor + 1)
    refuse("UNKNOWN_BATCH", txid > len(world.batches))
    if world.batches[txid - 1].is_given_up:
        return skipped(world, txid)
    refuse(why_not_sealed(world, txid))
    refuse("UNPROCESSED", not is_in_chain(world, txid))
    refuse("DECLARATION_CHANGED", world.code != world.version)
    refuse("UNPROCESSED", current(world, txid).damage)
    world = merged(world, txid)
    return world, f"committed {txid}:{world.commits[-1].attempt}"


def committed_already(world: World, txid: int) -> str | None:
    """Return the answer to any step at a committed batch (I8); None if the batch has not committed."""
    done = world.commits[txid - 1] if txid <= world.cursor else None
    return done and f"already {'skipped' if done.is_skipped else 'committed'} {txid}:{done.attempt}"


def why_not_sealed(world: World, txid: int, *, waits: bool = True) -> str | None:
    """Return why the newest attempt cannot be merged, if so. Unless one `waits`, an open attempt is as good as dead."""
    newest = world.batches[txid - 1].newest
    if newest and newest.phase == "open" and waits and not newest.is_silent:
        return "ATTEMPT_NOT_SEALED"
    return None if newest and is_sealed(world, newest) else "UNPROCESSED"


def merged(world: World, txid: int) -> World:
    """Count the records of a batch's newest attempt: each in its key's row and in the log; bad ones go into quarantine.

    The cursor advances in the same transaction (I2).
    """
    number, newest, rows = len(world.batches[txid - 1].attempts), world.batches[txid - 1].newest, dict(world.keyed)
    for key in {key_of(position) for position in newest.good}:
        old, new = rows.get(key, Row((), 0)), [position for position in newest.good if key_of(position) == key]
        before = (old.counted, old.txid) if old.txid and world.states == "opaque" else (None, None)
        rows[key] = Row((*old.counted, *new), txid, *before)
    changed = {(txid, key, row) for key, row in rows.items() if row.txid == txid and world.records_changes}
    return world._replace(
        commits=(*world.commits, Commit(number)),
        keyed=tuple(sorted(rows.items())),
        log=world.log | {(txid, position) for position in newest.good},
        aside=(*world.aside, *(Aside(txid, at, position) for at, position in enumerate(sorted(newest.bad), 1))),
        changes=world.changes | changed,
    )


def commit_ready(world: World) -> Step:
    """Commit what is ready and follows the last commit, as if one by one."""
    refuse("DECLARATION_CHANGED", world.code != world.version)
    after = world
    for txid in range(world.cursor + 1, len(world.batches) + 1)[: TOGETHER[world.states]]:
        batch = world.batches[txid - 1]
        if batch.is_halted or batch.is_given_up or not is_in_chain(world, txid) or why_not_sealed(world, txid):
            break
        after = merged(after, txid)
    ready = range(world.cursor + 1, after.cursor + 1)
    refuse("UNPROCESSED", any(current(world, txid).damage for txid in ready))
    return after, f"committed {[f'{txid}:{after.commits[txid - 1].attempt}' for txid in ready]}"


# Skip and redo


def skip(world: World, txid: int) -> Step:
    """Give up a failed batch: in its turn, a commit without rows takes its place."""
    refuse(committed_already(world, txid))
    refuse("UNKNOWN_BATCH", txid > len(world.batches))
    batch = world.batches[txid - 1]
    has_failed = batch.newest and (batch.newest.phase == "failed" or batch.is_halted or batch.is_given_up)
    refuse("RANGE_REFUSED", not has_failed)
    world = with_batch(world, txid, is_given_up=True, is_halted=batch.is_halted and batch.is_given_up)
    return skipped(world, txid) if txid == world.cursor + 1 else (world, "skipped in its turn")


def skipped(world: World, txid: int) -> Step:
    """Commit a batch that was given up, without rows, but not out of its chain (I12). The records it took up wait again."""
    refuse("UNPROCESSED", not is_in_chain(world, txid))
    back = tuple(record._replace(replayed_by=None) if record.replayed_by == txid else record for record in world.aside)
    number = len(world.batches[txid - 1].attempts)
    return world._replace(aside=back, commits=(*world.commits, Commit(number, is_skipped=True))), f"skipped {txid}:{number}"


def may_redo(world: World, txid: int) -> bool:
    """Return whether a txid is the last committed one, of states that know what they were before (I13)."""
    return txid == world.cursor > 0 and world.states == "opaque"


def redo(world: World, txid: int) -> Step:
    """Replace the effect of the last committed txid by that of its newest attempt (I13)."""
    refuse("RANGE_REFUSED", not may_redo(world, txid))
    number = len(world.batches[txid - 1].attempts)
    refuse("UNPROCESSED", number == world.commits[-1].attempt)
    refuse(why_not_sealed(world, txid, waits=False))
    refuse("DECLARATION_CHANGED", world.code != world.version)
    refuse("RANGE_REFUSED", any(record.txid == txid and record.replayed_by for record in world.aside))  # by a later batch
    refuse("UNPROCESSED", attempt(world, txid, number).damage)
    return merged(taken_back(world), txid), f"redone {txid}:{number}"


def taken_back(world: World) -> World:
    """Undo what the last txid did: each row that it changed is as it was before, also those that the new attempt lacks."""
    txid = world.cursor
    rows = [(key, row if row.txid != txid else Row(row.before or (), row.txid_before or 0)) for key, row in world.keyed]
    return world._replace(
        commits=world.commits[:-1],
        keyed=tuple((key, row) for key, row in rows if row.txid),  # else it had made the row, which disappears
        log=frozenset(entry for entry in world.log if entry[0] != txid),
        aside=tuple(record for record in world.aside if record.txid != txid),
        changes=frozenset(change for change in world.changes if change[0] != txid),
    )


# Faults that strike from outside


def lose_staging(world: World, txid: int, number: int, what: Literal["rows", "table"] = "table") -> Step:
    """Lose an attempt's staging: the whole table of rows per key, or one of its rows, if it has any."""
    own = attempt(world, txid, number)
    if own.damage != "dropped" and (what == "table" or (own.good and not own.damage)):
        world = with_attempt(world, txid, number, damage=what)
    return world, "lost"


def fall_silent(world: World, txid: int, number: int) -> Step:
    """Lose an attempt's heartbeat for more than a minute: it is taken for dead, but may go on later."""
    return with_attempt(world, txid, number, is_silent=True), "silent"


def beat(world: World, txid: int, number: int) -> Step:
    """Send an attempt's heartbeat, which says whether the attempt has neither ended nor been fenced."""
    refuse("False", attempt(world, txid, number).phase != "open")
    return with_attempt(world, txid, number, is_silent=False), "True"
