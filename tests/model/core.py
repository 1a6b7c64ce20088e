"""The core of the protocol in plain Python: from the plan of a batch to its commit, its redo, its skip, the loss of its rows.

A `World` is what the ledger and the states of one pipeline hold. Each function below is one step of `StateStore`: it takes a
world and returns the next one, and what the step answers: a word, or the code of the error that it raises. A step that is
refused changes nothing. Numbers such as I4 are rules of docs/protocol.md.

The source is a list of records, known by their positions; a batch reads the positions from `start` up to `end`. A row of the
state keeps the positions that have counted in it, so that one that is lost, or counts twice, shows.
"""

from typing import Literal, NamedTuple

WINDOW = 2  # the batches that may be begun and not committed
BATCHES_TOGETHER = 100


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
    damage: Literal["", "rows", "table"] = ""
    is_dropped: bool = False  # its staging, because its batch has committed long ago
    read_other_rows: bool = False  # whether the source gave it other ones than the planned ones

    @property
    def rows_read(self) -> tuple[list[int], bool]:
        """The rows that the source gave it, as their sum of hashes shows them (I11)."""
        return sorted((*self.good, *self.bad)), self.read_other_rows


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
    is_skipped: bool


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


# What a batch reads


def key_of(position: int) -> str:
    """Return the key of a record."""
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


def records(world: World, txid: int, source: Input) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the positions that count for a batch with this input, and the bad ones that are set aside."""
    if source.replayed:
        taken = [record for record in world.aside if record.replayed_by == txid]
        return tuple(r.position for r in taken if r.is_mended), tuple(r.position for r in taken if not r.is_mended)
    positions = range(source.start, source.end)
    bad = tuple(position for position in positions if world.quarantines and is_bad(position))
    return tuple(position for position in positions if position not in bad), bad


# Plan and process


def plan(world: World, sizes: tuple[int, ...], *, takes_up: bool = False) -> Step:
    """Freeze the inputs of new batches, one after another (I6), and lift the halts of the old ones that the run `takes_up`."""
    if sizes and world.code != world.version:
        return world, "DECLARATION_CHANGED"
    batches = world.batches
    pending = range(world.cursor + 1, len(batches) + 1) if takes_up else range(0)
    batches = tuple(b._replace(is_halted=b.is_halted and txid not in pending) for txid, b in enumerate(batches, 1))
    last = input_before(world, len(batches) + 1)
    for size in sizes:
        start = last.end if last else 0
        new = Input(start, start + size)
        batches, last = (*batches, Batch(new, last)), new
    covered = [*pending, *range(len(world.batches) + 1, len(batches) + 1)]
    return world._replace(batches=batches), f"opened {covered}"


def start(world: World, txid: int, mode: str = "resume", size: int = 1) -> Step:
    """Begin an attempt, which fences all older ones (I4); an opaque source chooses `size` records if it has to choose again."""
    if not 0 < txid <= len(world.batches):
        return world, "UNKNOWN_BATCH"
    if mode == "redo":
        if not may_redo(world, txid):
            return world, "RANGE_REFUSED"
    elif txid <= world.cursor:
        return world, committed_already(world, txid)
    if world.code != world.version:
        return world, "DECLARATION_CHANGED"
    batch, chosen, before = world.batches[txid - 1], current(world, txid), input_before(world, txid)
    keeps_input = chosen.continues == before
    if mode != "redo" and (why := why_not_started(world, txid, mode, keeps_input=keeps_input)):
        return world, why
    read = chosen.input
    if world.source == "opaque" and (batch.attempts or not keeps_input):
        end = before.end if before else 0
        read = Input(before.start, before.end, read.replayed) if read.replayed and before else Input(end, end + size)
    older = tuple(a._replace(phase="failed") if a.phase == "open" else a for a in batch.attempts)
    new = Attempt(read, before, world.code)
    started = batch._replace(attempts=(*older, new), is_halted=False, is_given_up=False)
    return with_batch(world, txid, started), f"attempt {len(started.attempts)}"


def why_not_started(world: World, txid: int, mode: str, *, keeps_input: bool) -> str | None:
    """Return why an uncommitted batch gets no attempt, if so."""
    batch = world.batches[txid - 1]
    newest = batch.newest
    if batch.is_given_up and keeps_input:
        return "GIVEN_UP"
    is_sealed = newest is not None and newest.phase == "sealed" and newest.version == world.code and keeps_input
    if mode != "restage" and is_sealed:
        return "SEALED"
    if mode == "first" and newest:
        return "BEGUN"
    if world.is_paused and not batch.attempts:
        return "PAUSED"
    return "AHEAD" if txid - world.cursor > WINDOW else None


def stage(world: World, txid: int, number: int) -> Step:
    """Write an attempt's rows into staging of its own, which fences do not keep it from (I5); again, if a task runs twice."""
    own = attempt(world, txid, number)
    if own.damage == "table":
        return world, "UNPROCESSED"
    if own.phase == "open":
        good, bad = records(world, txid, own.input)
        own = own._replace(is_staged=True, good=good, bad=bad, damage="")
    return with_attempt(world, txid, number, own), "staged"


def seal(world: World, txid: int, number: int, *, other_rows: bool = False) -> Step:
    """Declare an attempt's staging complete, unless a newer one owns the batch (I4, I5) or the source gave other rows (I11)."""
    own, batch = attempt(world, txid, number), world.batches[txid - 1]
    if number != len(batch.attempts) or own.phase == "failed":
        return world, "ATTEMPT_FENCED"
    if own.phase == "sealed":
        return world, "sealed"
    same = [a for a in batch.attempts[:-1] if (a.input, a.version, a.phase) == (own.input, own.version, "sealed")]
    read = own._replace(read_other_rows=other_rows).rows_read
    if world.source == "transactional" and same and same[0].rows_read != read:
        return world, "SOURCE_CHANGED"
    return with_attempt(world, txid, number, own._replace(phase="sealed", read_other_rows=other_rows)), "sealed"


def fail(world: World, txid: int, number: int, *, is_poison: bool = False) -> Step:
    """Record that an attempt has failed, unless it has ended or a newer one owns the batch (I5)."""
    own = attempt(world, txid, number)
    if number != len(world.batches[txid - 1].attempts):
        return world, "ATTEMPT_FENCED"
    if own.phase == "open":
        world = with_attempt(world, txid, number, own._replace(phase="failed", is_poison=is_poison))
    return world, f"{poison_tries(world, txid)} tries"


def poison_tries(world: World, txid: int) -> int:
    """Return how many attempts have failed by the batch's content since an operator chose to retry it."""
    batch = world.batches[txid - 1]
    return sum(a.is_poison for a in batch.attempts[batch.tries_after :])


# Commit


def commit(world: World, txid: int) -> Step:
    """Commit a batch in its turn (I3), once (I8), by its newest attempt (I4), all of whose sealed rows are there (I7)."""
    if txid <= world.cursor:
        return world, committed_already(world, txid)
    if txid != world.cursor + 1:
        return world, "COMMIT_OUT_OF_ORDER"
    if txid > len(world.batches):
        return world, "UNKNOWN_BATCH"
    if world.batches[txid - 1].is_given_up:
        return skipped(world, txid)
    if (why := why_not_sealed(world, txid)) or (why := why_not_merged(world, txid)):
        return world, why
    world = recorded(merged(world, txid), txid, is_skipped=False)
    return world, f"committed {txid}:{world.commits[-1].attempt}"


def why_not_sealed(world: World, txid: int, *, waits: bool = True) -> str | None:
    """Return why the newest attempt cannot be merged, if so. Unless one `waits`, an open attempt is as good as dead."""
    newest = world.batches[txid - 1].newest
    if newest is None or newest.phase == "failed":
        return "UNPROCESSED"
    if newest.phase == "open":
        return "UNPROCESSED" if newest.is_silent or not waits else "ATTEMPT_NOT_SEALED"
    return "UNPROCESSED" if newest.version != world.code else None


def why_not_merged(world: World, txid: int) -> str | None:
    """Return why a sealed attempt is not merged, if so: by what it continues (I12), other code (I16), lost rows (I7)."""
    newest = world.batches[txid - 1].newest
    assert newest, "it is sealed"
    if newest.continues != input_before(world, txid):
        return "UNPROCESSED"
    if world.code != world.version:
        return "DECLARATION_CHANGED"
    return "UNPROCESSED" if newest.damage else None


def merged(world: World, txid: int) -> World:
    """Count the records of a batch's newest attempt: each in its key's row and in the log; bad ones go into quarantine."""
    newest = world.batches[txid - 1].newest
    assert newest, "it is sealed"
    rows = dict(world.keyed)
    for key in sorted({key_of(position) for position in newest.good}):
        new, old = [position for position in newest.good if key_of(position) == key], rows.get(key)
        kept = (old.counted, old.txid) if old and world.states == "opaque" else (None, None)
        rows[key] = Row((*(old.counted if old else ()), *new), txid, *kept)
    aside = tuple(Aside(txid, number, position) for number, position in enumerate(sorted(newest.bad), 1))
    log = world.log | {(txid, position) for position in newest.good}
    changes = world.changes | {(txid, key, row) for key, row in rows.items() if row.txid == txid and world.records_changes}
    return world._replace(keyed=tuple(sorted(rows.items())), log=log, aside=(*world.aside, *aside), changes=changes)


def recorded(world: World, txid: int, *, is_skipped: bool) -> World:
    """Advance the cursor, in the same transaction (I2)."""
    return world._replace(commits=(*world.commits, Commit(len(world.batches[txid - 1].attempts), is_skipped)))


def commit_ready(world: World) -> Step:
    """Commit what is ready and follows the last commit, as if one by one; of opaque states, which keep what was before, one."""
    if world.code != world.version:
        return world, "DECLARATION_CHANGED"
    ready: list[int] = []
    before = input_before(world, world.cursor + 1)
    for txid, batch in list(enumerate(world.batches, 1))[world.cursor :]:
        stops = batch.is_halted or batch.is_given_up or current(world, txid).continues != before
        if stops or why_not_sealed(world, txid) or len(ready) == (1 if world.states == "opaque" else BATCHES_TOGETHER):
            break
        ready, before = [*ready, txid], current(world, txid).input
    next_world = world
    for txid in ready:
        if world.batches[txid - 1].newest.damage:  # type: ignore[union-attr] - it is sealed
            return world, "UNPROCESSED"
        next_world = recorded(merged(next_world, txid), txid, is_skipped=False)
    return next_world, f"committed {[f'{txid}:{next_world.commits[txid - 1].attempt}' for txid in ready]}"


def committed_already(world: World, txid: int) -> str:
    """Return the answer to any step at a committed batch (I8)."""
    done = world.commits[txid - 1]
    return f"already {'skipped' if done.is_skipped else 'committed'} {txid}:{done.attempt}"


# Skip and redo


def skip(world: World, txid: int) -> Step:
    """Give up a failed batch: in its turn, a commit without rows takes its place."""
    if txid <= world.cursor:
        return world, committed_already(world, txid)
    if txid > len(world.batches):
        return world, "UNKNOWN_BATCH"
    batch = world.batches[txid - 1]
    if batch.newest is None or not (batch.newest.phase == "failed" or batch.is_halted or batch.is_given_up):
        return world, "RANGE_REFUSED"
    given_up = with_batch(world, txid, batch._replace(is_given_up=True, is_halted=batch.is_halted and batch.is_given_up))
    if txid != world.cursor + 1:
        return given_up, "skipped in its turn"
    next_world, answer = skipped(given_up, txid)
    return (world if next_world is given_up else next_world), answer


def skipped(world: World, txid: int) -> Step:
    """Commit a batch that was given up, without rows, but not out of its chain (I12). The records it took up wait again."""
    if current(world, txid).continues != input_before(world, txid):
        return world, "UNPROCESSED"
    back = tuple(record._replace(replayed_by=None) if record.replayed_by == txid else record for record in world.aside)
    world = recorded(world._replace(aside=back), txid, is_skipped=True)
    return world, f"skipped {txid}:{world.commits[-1].attempt}"


def may_redo(world: World, txid: int) -> bool:
    """Return whether a txid is the last committed one, of states that know what they were before (I13)."""
    return txid == world.cursor > 0 and world.states == "opaque"


def redo(world: World, txid: int) -> Step:
    """Replace the effect of the last committed txid by that of its newest attempt (I13)."""
    if not may_redo(world, txid):
        return world, "RANGE_REFUSED"
    batch = world.batches[txid - 1]
    if len(batch.attempts) == world.commits[-1].attempt:
        return world, "UNPROCESSED"
    if why := why_not_sealed(world, txid, waits=False):
        return world, why
    if world.code != world.version:
        return world, "DECLARATION_CHANGED"
    if any(record.txid == txid and record.replayed_by for record in world.aside):
        return world, "RANGE_REFUSED"  # a later batch has taken up its bad records
    if attempt(world, txid, len(batch.attempts)).damage:
        return world, "UNPROCESSED"
    world = merged(taken_back(world, txid), txid)
    again = Commit(len(batch.attempts), is_skipped=False)
    return world._replace(commits=(*world.commits[:-1], again)), f"redone {txid}:{again.attempt}"


def taken_back(world: World, txid: int) -> World:
    """Undo what a txid did: each row that it changed is as it was before, also those that the new attempt lacks."""
    rows = {}
    for key, row in world.keyed:
        if row.txid != txid:
            rows[key] = row
        elif row.before is not None and row.txid_before is not None:  # else it has made the row, which disappears
            rows[key] = Row(row.before, row.txid_before)
    log = frozenset(entry for entry in world.log if entry[0] != txid)
    aside = tuple(record for record in world.aside if record.txid != txid)
    changes = frozenset(change for change in world.changes if change[0] != txid)
    return world._replace(keyed=tuple(rows.items()), log=log, aside=aside, changes=changes)


# Faults that strike from outside


def lose_staging(world: World, txid: int, number: int, what: Literal["rows", "table"] = "table") -> Step:
    """Lose an attempt's staging: the whole table of rows per key, or one of its rows, if it has any."""
    own = attempt(world, txid, number)
    if what == "table" or (own.good and not own.damage):
        own = own._replace(damage=what)
    return with_attempt(world, txid, number, own), "lost"


def fall_silent(world: World, txid: int, number: int) -> Step:
    """Lose an attempt's heartbeat for more than a minute: it is taken for dead, but may go on later."""
    return with_attempt(world, txid, number, attempt(world, txid, number)._replace(is_silent=True)), "silent"


def beat(world: World, txid: int, number: int) -> Step:
    """Send an attempt's heartbeat, which says whether the attempt has neither ended nor been fenced."""
    own = attempt(world, txid, number)
    if own.phase != "open":
        return world, "False"
    return with_attempt(world, txid, number, own._replace(is_silent=False)), "True"


# Parts of worlds


def attempt(world: World, txid: int, number: int) -> Attempt:
    """Return an attempt at a batch."""
    return world.batches[txid - 1].attempts[number - 1]


def with_batch(world: World, txid: int, batch: Batch) -> World:
    """Return a world with another batch in the place of one."""
    return world._replace(batches=(*world.batches[: txid - 1], batch, *world.batches[txid:]))


def with_attempt(world: World, txid: int, number: int, own: Attempt) -> World:
    """Return a world with another attempt in the place of one."""
    batch = world.batches[txid - 1]
    attempts = (*batch.attempts[: number - 1], own, *batch.attempts[number:])
    return with_batch(world, txid, batch._replace(attempts=attempts))
