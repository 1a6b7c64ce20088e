"""The rest of the protocol, around its core: operators, other declarations, the quarantine, an older copy of the database.

`take` is the whole model: it takes a step of the core, or one of those below, unless something here forbids it.
"""

from collections.abc import Callable
from typing import Any

from tests.model import core
from tests.model.core import Aside, Batch, Input, Step, World, refuse, with_attempt, with_batch

LOSES_COMMITS = {"restore"}  # the steps after which what has committed may be gone
DROPS_AT_ONCE = 20


def take(world: World, step: str, **arguments: Any) -> Step:
    """Take a step."""
    return core.taken(_step, world, step, **arguments)


def _step(world: World, step: str, *, history: int = 0, **arguments: Any) -> Step:
    """Refuse what is not even looked at; else take the step. One of an attempt is of the `history` in which it began."""
    txid, number = arguments.get("txid"), arguments.get("number", 0)
    is_known = txid is None or 0 < txid <= len(world.batches)
    match step:
        case "seal" | "fail":  # a history that has lost commits hands out numbers again (I4)
            refuse("UNKNOWN_BATCH", not is_known)
            refuse("ATTEMPT_FENCED", history != world.history or number > len(world.batches[txid - 1].attempts))
        case "commit" | "skip" | "start" if is_known or step != "start":
            refuse("HOLE_DETECTED", world.is_lost)  # I9
            is_due = core.may_redo(world, txid) if arguments.get("mode") == "redo" else txid > world.cursor
            refuse("PIPELINE_RETIRED", world.is_retired and is_due)  # I23, but what has committed is said to be so (I8)
        case "pause" | "resume" | "retry" | "migrate" | "mend":
            refuse("PIPELINE_RETIRED", world.is_retired)
        case "plan" | "commit_ready" | "redo" | "replay" | "prune":
            refuse("PIPELINE_RETIRED", world.is_retired)
            refuse("PIPELINE_PAUSED", world.is_paused and step == "plan")
            refuse("HOLE_DETECTED", world.is_lost)
    return STEPS[step](world, **arguments)


# What an operator, or a pipeline's policy, decides about a batch


def give_up(world: World, txid: int, tries: int = 1) -> Step:
    """Give up a batch whose newest attempt has failed by its content, after so many such failures."""
    refuse("UNKNOWN_BATCH", txid > len(world.batches))
    batch = world.batches[txid - 1]
    is_poison = batch.newest is not None and batch.newest.is_poison
    refuse("False", not is_poison or core.poison_tries(batch) < tries or txid <= world.cursor or batch.is_given_up)
    return with_batch(world, txid, is_given_up=True, is_halted=False), "True"


def halt(world: World, txid: int) -> Step:
    """Let a batch wait for a person, unless it has committed or was given up."""
    is_open = world.cursor < txid <= len(world.batches) and not world.is_retired
    if is_open and not world.batches[txid - 1].is_given_up:
        world = with_batch(world, txid, is_halted=True)
    return world, "halted"


def retry(world: World, txid: int | None = None) -> Step:
    """Let a batch, or all that were halted or given up, be tried again, as if none of them had failed."""
    uncommitted = list(enumerate(world.batches, 1))[world.cursor :]
    chosen = [n for n, batch in uncommitted if (n == txid if txid else batch.is_halted or batch.is_given_up)]
    for n in chosen:
        world = with_batch(world, n, is_halted=False, is_given_up=False, tries_after=len(world.batches[n - 1].attempts))
    return world, f"retried {chosen}"


# The pipeline


def retire(world: World) -> Step:
    """Let no step go on, unless an attempt is alive; others end (I23)."""
    refuse("retired already", world.is_retired)
    recent = [own for batch in world.batches[max(world.cursor - 1, 0) :] for own in batch.attempts]
    refuse("ATTEMPT_NOT_SEALED", any(own.phase == "open" and not own.is_silent for own in recent))
    batches = tuple(batch._replace(attempts=core.ended(batch.attempts)) for batch in world.batches)
    return world._replace(is_retired=True, batches=batches), "retired"


# The quarantine


def mend(world: World, txid: int, number: int) -> Step:
    """Correct a record that waits in quarantine, once."""
    found = [record for record in world.aside if (record.txid, record.number) == (txid, number)]
    refuse("UNKNOWN_BATCH", not found)
    refuse("RANGE_REFUSED", found[0].replayed_by is not None or found[0].is_mended)
    return _with_records(world, found, is_mended=True), "mended"


def replay(world: World, txid: int | None = None) -> Step:
    """Open a batch of the records that wait in quarantine, of one txid or all; the source's position stays."""
    new = len(world.batches) + 1
    waiting, last = [r for r in world.aside if r.replayed_by is None and txid in (None, r.txid)], core.input_before(world, new)
    refuse("nothing waits", not waiting or last is None)
    batch = Batch(Input(last.start, last.end, len(waiting)), last)
    world = _with_records(world._replace(batches=(*world.batches, batch)), waiting, replayed_by=new)
    return world, f"replays {len(waiting)} by {new}"


def _with_records(world: World, changed: list[Aside], **values: object) -> World:
    return world._replace(aside=tuple(r._replace(**values) if r in changed else r for r in world.aside))


# Garbage, and an older copy


def drop_old_staging(world: World) -> Step:
    """Drop the staging of committed batches, some attempts at a time (I18): here, where all is old, that of a redo, too."""
    committed = list(enumerate(world.batches, 1))[: world.cursor]
    kept = [(txid, n) for txid, b in committed for n, own in enumerate(b.attempts, 1) if own.damage != "dropped"]
    for at in kept[:DROPS_AT_ONCE]:
        world = with_attempt(world, *at, damage="dropped")
    return world, str(len(kept[:DROPS_AT_ONCE]))


def prune(world: World, txid: int) -> Step:
    """Remove the recorded changes of txids up to one that has committed."""
    refuse("RANGE_REFUSED", txid > world.cursor)
    return world._replace(changes=frozenset(change for change in world.changes if change[0] > txid)), "pruned"


def restore(world: World, marked: tuple[int, int] | None) -> Step:
    """Put the copy, without staging, in the place of the database.

    `marked` is the last commit of the copy's history that the witness knows (I9).
    """
    refuse("no copy", world.copy is None)
    older = world.copy
    for txid, batch in enumerate(older.batches, 1):
        older = with_batch(older, txid, attempts=tuple(own._replace(damage="table") for own in batch.attempts))
    txid, number = marked or (0, 0)
    is_lost = txid > older.cursor or (txid > 0 and older.commits[txid - 1].attempt < number)
    return older._replace(is_lost=is_lost, code=world.code, histories=world.histories), "restored"


def accept(world: World) -> Step:
    """Let the pipeline go on without the commits that it has lost, in another history."""
    refuse("nothing to accept", not world.is_lost or world.is_retired)
    return world._replace(is_lost=False, history=world.histories + 1, histories=world.histories + 1), "accepted"


# What takes one look: a pause lets no new run plan; processes run the code of a version that only a migration registers (I16);
# a retired pipeline is reinstated at the same txid.
SIMPLE: dict[str, Callable[..., Step]] = {
    "pause": lambda world: (world._replace(is_paused=True), str(not world.is_paused)),
    "resume": lambda world: (world._replace(is_paused=False), str(world.is_paused)),
    "reinstate": lambda world: (world._replace(is_retired=False), str(world.is_retired)),
    "deploy": lambda world, version: (world._replace(code=version), "deployed"),
    "migrate": lambda world: (world._replace(version=world.code), "unchanged" if world.version == world.code else "registered"),
    "back_up": lambda world: (world._replace(copy=world._replace(copy=None)), "copied"),
}
OF_CORE = "plan start stage seal fail beat commit commit_ready skip redo lose_staging fall_silent"
OTHERS = (give_up, halt, retry, retire, mend, replay, drop_old_staging, prune, restore, accept)
STEPS = SIMPLE | {step: getattr(core, step) for step in OF_CORE.split()} | {law.__name__: law for law in OTHERS}
