"""The rest of the protocol, around its core: operators, other declarations, the quarantine, an older copy of the database.

Steps of the core that something here forbids are wrapped below; all others are those of `tests.model.core`.
"""

from typing import Literal

from tests.model import core
from tests.model.core import Aside, Attempt, Batch, Input, Step, World, attempt, input_before, poison_tries, with_batch

LOSES_COMMITS = {"restore"}  # the steps after which what has committed may be gone
DROPS_AT_ONCE = 20


def first_world(
    source: Literal["transactional", "opaque"],
    states: Literal["transactional", "opaque"],
    quarantines: bool,
    records_changes: bool,
) -> World:
    """Return the world of a pipeline that was just registered."""
    return World(source, states, quarantines, records_changes)


# The steps of the core, where an operation forbids them (I9, I23)


def out_of_service(world: World) -> str | None:
    """Return why no step goes on, if so."""
    if world.is_retired:
        return "PIPELINE_RETIRED"
    return "HOLE_DETECTED" if world.is_lost else None


def plan(world: World, sizes: tuple[int, ...], *, takes_up: bool = False) -> Step:
    """Plan, unless the pipeline is paused."""
    why = "PIPELINE_RETIRED" if world.is_retired else "PIPELINE_PAUSED" if world.is_paused else out_of_service(world)
    return (world, why) if why else core.plan(world, sizes, takes_up=takes_up)


def start(world: World, txid: int, mode: str = "resume", size: int = 1) -> Step:
    """Begin an attempt; what has committed is said to be so in a retired pipeline, too (I8), but in no older copy (I9)."""
    is_due = core.may_redo(world, txid) if mode == "redo" else txid > world.cursor
    if 0 < txid <= len(world.batches):
        if world.is_lost:
            return world, "HOLE_DETECTED"
        if is_due and world.is_retired:
            return world, "PIPELINE_RETIRED"
    return core.start(world, txid, mode, size)


def stage(world: World, txid: int, number: int, history: int = 0) -> Step:
    """Write an attempt's rows into its staging."""
    return core.stage(world, txid, number)


def seal(world: World, txid: int, number: int, history: int = 0, *, other_rows: bool = False) -> Step:
    """Seal an attempt of this history."""
    why = _not_of_history(world, txid, number, history)
    return (world, why) if why else core.seal(world, txid, number, other_rows=other_rows)


def fail(world: World, txid: int, number: int, history: int = 0, *, is_poison: bool = False) -> Step:
    """Fail an attempt of this history."""
    why = _not_of_history(world, txid, number, history)
    return (world, why) if why else core.fail(world, txid, number, is_poison=is_poison)


def beat(world: World, txid: int, number: int, history: int = 0) -> Step:
    """Send an attempt's heartbeat."""
    return core.beat(world, txid, number)


def lose_staging(world: World, txid: int, number: int, history: int = 0, what: Literal["rows", "table"] = "table") -> Step:
    """Lose an attempt's staging."""
    return core.lose_staging(world, txid, number, what)


def fall_silent(world: World, txid: int, number: int, history: int = 0) -> Step:
    """Lose an attempt's heartbeat."""
    return core.fall_silent(world, txid, number)


def _not_of_history(world: World, txid: int, number: int, history: int) -> str | None:
    """Return why an attempt does not count in this history, if so: one that has lost commits hands out numbers again (I4)."""
    if txid > len(world.batches):
        return "UNKNOWN_BATCH"
    is_ours = history == world.history and number <= len(world.batches[txid - 1].attempts)
    return None if is_ours else "ATTEMPT_FENCED"


def commit(world: World, txid: int) -> Step:
    """Commit a batch."""
    return (world, why) if (why := _not_committed(world, txid)) else core.commit(world, txid)


def skip(world: World, txid: int) -> Step:
    """Skip a batch."""
    return (world, why) if (why := _not_committed(world, txid)) else core.skip(world, txid)


def _not_committed(world: World, txid: int) -> str | None:
    if world.is_lost:
        return "HOLE_DETECTED"
    return "PIPELINE_RETIRED" if world.is_retired and txid > world.cursor else None


def commit_ready(world: World) -> Step:
    """Commit what is ready."""
    return (world, why) if (why := out_of_service(world)) else core.commit_ready(world)


def redo(world: World, txid: int) -> Step:
    """Redo the last committed batch."""
    return (world, why) if (why := out_of_service(world)) else core.redo(world, txid)


# What an operator, or a pipeline's policy, decides about a batch


def give_up(world: World, txid: int, tries: int = 1) -> Step:
    """Give up a batch whose newest attempt has failed by its content, after so many such failures."""
    if txid > len(world.batches):
        return world, "UNKNOWN_BATCH"
    batch = world.batches[txid - 1]
    is_poison = batch.newest is not None and batch.newest.is_poison
    if not is_poison or poison_tries(world, txid) < tries or txid <= world.cursor or batch.is_given_up:
        return world, "False"
    return with_batch(world, txid, batch._replace(is_given_up=True, is_halted=False)), "True"


def halt(world: World, txid: int) -> Step:
    """Let a batch wait for a person, unless it has committed or was given up."""
    is_open = world.cursor < txid <= len(world.batches) and not world.is_retired
    if is_open and not (batch := world.batches[txid - 1]).is_given_up:
        world = with_batch(world, txid, batch._replace(is_halted=True))
    return world, "halted"


def retry(world: World, txid: int | None = None) -> Step:
    """Let a batch, or all that were halted or given up, be tried again, as if none of them had failed."""
    if world.is_retired:
        return world, "PIPELINE_RETIRED"
    uncommitted = list(enumerate(world.batches, 1))[world.cursor :]
    chosen = [n for n, batch in uncommitted if (n == txid if txid else batch.is_halted or batch.is_given_up)]
    for n in chosen:
        batch = world.batches[n - 1]
        again = batch._replace(is_halted=False, is_given_up=False, tries_after=len(batch.attempts))
        world = with_batch(world, n, again)
    return world, f"retried {chosen}"


# The pipeline


def pause(world: World) -> Step:
    """Let no new run plan."""
    return (world, "PIPELINE_RETIRED") if world.is_retired else (world._replace(is_paused=True), str(not world.is_paused))


def resume(world: World) -> Step:
    """Let runs plan again."""
    return (world, "PIPELINE_RETIRED") if world.is_retired else (world._replace(is_paused=False), str(world.is_paused))


def retire(world: World) -> Step:
    """Let no step go on, unless an attempt is alive; others end (I23)."""
    if world.is_retired:
        return world, "retired already"
    batches = world.batches[max(world.cursor - 1, 0) :]
    if any(a.phase == "open" and not a.is_silent for batch in batches for a in batch.attempts):
        return world, "ATTEMPT_NOT_SEALED"

    def ended(own: Attempt) -> Attempt:
        return own._replace(phase="failed") if own.phase == "open" else own

    batches = tuple(batch._replace(attempts=tuple(map(ended, batch.attempts))) for batch in world.batches)
    return world._replace(is_retired=True, batches=batches), "retired"


def reinstate(world: World) -> Step:
    """Let a retired pipeline go on at the same txid."""
    return world._replace(is_retired=False), str(world.is_retired)


def deploy(world: World, version: int) -> Step:
    """Let processes run the code of another version, which is registered only by a migration."""
    return world._replace(code=version), "deployed"


def migrate(world: World) -> Step:
    """Register the declaration of the code (I16)."""
    if world.is_retired:
        return world, "PIPELINE_RETIRED"
    return world._replace(version=world.code), "registered" if world.version != world.code else "unchanged"


# The quarantine


def mend(world: World, txid: int, number: int) -> Step:
    """Correct a record that waits in quarantine, once."""
    if world.is_retired:
        return world, "PIPELINE_RETIRED"
    found = next((record for record in world.aside if (record.txid, record.number) == (txid, number)), None)
    if found is None:
        return world, "UNKNOWN_BATCH"
    if found.replayed_by is not None or found.is_mended:
        return world, "RANGE_REFUSED"
    return _with_records(world, [found], is_mended=True), "mended"


def replay(world: World, txid: int | None = None) -> Step:
    """Open a batch of the records that wait in quarantine, of one txid or all; the source's position stays."""
    if why := out_of_service(world):
        return world, why
    taken = [r for r in world.aside if r.replayed_by is None and txid in (None, r.txid)]
    last = input_before(world, len(world.batches) + 1)
    if not taken or last is None:
        return world, "nothing waits"
    new = len(world.batches) + 1
    batch = Batch(Input(last.start, last.end, len(taken)), last)
    world = _with_records(world._replace(batches=(*world.batches, batch)), taken, replayed_by=new)
    return world, f"replays {len(taken)} by {new}"


def _with_records(world: World, changed: list[Aside], **values: object) -> World:
    return world._replace(aside=tuple(r._replace(**values) if r in changed else r for r in world.aside))


# Garbage, and an older copy


def drop_old_staging(world: World) -> Step:
    """Drop the staging of committed batches, some attempts at a time (I18): here, where all is old, that of a redo, too."""
    old = [
        (txid, number) for txid in range(1, world.cursor + 1) for number in range(1, len(world.batches[txid - 1].attempts) + 1)
    ]
    old = [at for at in old if not attempt(world, *at).is_dropped][:DROPS_AT_ONCE]
    for at in old:
        world = core.with_attempt(world, *at, attempt(world, *at)._replace(is_dropped=True, damage="table"))
    return world, str(len(old))


def prune(world: World, txid: int) -> Step:
    """Remove the recorded changes of txids up to one that has committed."""
    if (why := out_of_service(world)) or txid > world.cursor:
        return world, why or "RANGE_REFUSED"
    return world._replace(changes=frozenset(change for change in world.changes if change[0] > txid)), "pruned"


def back_up(world: World) -> Step:
    """Copy the database."""
    return world._replace(copy=world._replace(copy=None)), "copied"


def restore(world: World, marked: tuple[int, int] | None) -> Step:
    """Put the copy, without staging, in the place of the database.

    `marked` is the last commit of the copy's history that the witness knows (I9).
    """
    if world.copy is None:
        return world, "no copy"
    older = world.copy

    def without_staging(batch: Batch) -> Batch:
        return batch._replace(attempts=tuple(own._replace(damage="table") for own in batch.attempts))

    is_lost = marked is not None and not _has(older, *marked)
    batches = tuple(map(without_staging, older.batches))
    return older._replace(batches=batches, is_lost=is_lost, code=world.code, histories=world.histories), "restored"


def _has(world: World, txid: int, number: int) -> bool:
    return txid == 0 or (txid <= world.cursor and world.commits[txid - 1].attempt >= number)


def accept(world: World) -> Step:
    """Let the pipeline go on without the commits that it has lost, in another history."""
    if not world.is_lost or world.is_retired:
        return world, "nothing to accept"
    return world._replace(is_lost=False, history=world.histories + 1, histories=world.histories + 1), "accepted"
