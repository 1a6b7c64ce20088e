"""The invariants of docs/protocol.md, by their numbers, as functions of worlds of the model.

Those of a world say what holds in each snapshot; those of a step compare a world with the next one. Each raises an
AssertionError whose message begins with the number.
"""

from collections import Counter

from tests.model.core import WINDOW, World, attempt, current, is_in_chain, key_of, with_attempt


def i1_single_truth(world: World) -> None:
    """The states are the fold of the committed batches, each once: here, of the rows that their attempts have sealed."""
    merged = [(txid, attempt(world, txid, done.attempt)) for txid, done in enumerate(world.commits, 1) if not done.is_skipped]
    counted = Counter((txid, position) for txid, own in merged for position in own.good)
    assert Counter(world.log) == counted, f"I1: the log has {sorted(world.log)}, committed are {sorted(counted)}"
    by_key = Counter((key_of(position), position) for _, position in counted.elements())
    rows = Counter((key, position) for key, row in world.keyed for position in row.counted)
    assert rows == by_key, f"I1: rows have {rows}, committed are {by_key}"


def i3_order(world: World) -> None:
    """Only what is in the window has begun: the cursor has passed all batches before it."""
    begun = [txid for txid, batch in enumerate(world.batches, 1) if batch.attempts]
    assert max(begun, default=0) <= world.cursor + WINDOW, f"I3: {begun} have begun after {world.cursor}"
    assert world.cursor <= len(world.batches), "I3: a batch has committed that was not planned"


def i4_fence(world: World) -> None:
    """Of the attempts at a batch, all but the newest have ended."""
    for batch in world.batches:
        assert all(older.phase != "open" for older in batch.attempts[:-1]), f"I4: two attempts own {batch}"


def i7_sealed_staging(world: World) -> None:
    """What has committed is an attempt that was sealed."""
    for txid, done in enumerate(world.commits, 1):
        is_sealed = done.is_skipped or attempt(world, txid, done.attempt).phase == "sealed"
        assert is_sealed, f"I7: {txid}:{done.attempt} has committed, and is not sealed"


def i12_consumed_once(world: World) -> None:
    """The inputs of the committed batches lie end to end, and each continues the one before."""
    end = 0
    for txid in range(1, world.cursor + 1):
        read = current(world, txid).input
        start = read.end if read.replayed else read.start
        assert start == end, f"I12: {txid} begins at {start}, the one before has ended at {end}"
        assert is_in_chain(world, txid), f"I12: {txid} continues another batch"
        end = read.end


def i14_agreement(world: World) -> None:
    """No row is of a txid that has not committed, and each row of the keyed state is of the last batch that has its key."""
    for key, row in world.keyed:
        last = max(txid for txid, position in world.log if key_of(position) == key)
        assert row.txid == last <= world.cursor, f"I14: row {key} is of {row.txid}, its last batch is {last} of {world.cursor}"


OF_WORLDS = (i1_single_truth, i3_order, i4_fence, i7_sealed_staging, i12_consumed_once, i14_agreement)


def i2_atomicity(before: World, after: World) -> None:
    """A step commits batches one after another, and none other."""
    assert after.cursor >= before.cursor, "I2: a commit is gone"
    changed = {txid for txid, _ in after.log - before.log} - {before.cursor}
    assert changed <= {*range(before.cursor + 1, after.cursor + 1)}, f"I2: rows of {changed} without their commit"


def i5_inertness(before: World, after: World, txid: int, number: int) -> None:
    """Nothing that a fenced attempt does changes anything but its own staging."""
    if number < len(before.batches[txid - 1].attempts):
        was = attempt(before, txid, number)
        is_inert = with_attempt(after, txid, number, **was._asdict()) == before
        assert is_inert, f"I5: the fenced attempt {txid}:{number} changed something"
        assert attempt(after, txid, number).phase == was.phase, f"I5: the fenced attempt {txid}:{number} has ended again"


def i6_metadata_once(before: World, after: World) -> None:
    """What was planned stays, and so does what an attempt reads."""
    for was, now in zip(before.batches, after.batches, strict=False):
        for old, new in ((was, now), *zip(was.attempts, now.attempts, strict=False)) if was is not now else ():
            assert (old.input, old.continues) == (new.input, new.continues), f"I6: {old} reads something else now"


def i8_idempotence(before: World, after: World, step: str) -> None:
    """What has committed stays so; only a redo, and only of the last one, puts another attempt in its place."""
    kept = before.commits[:-1] if step == "redo" else before.commits
    assert after.commits[: len(kept)] == kept, f"I8: {before.commits} had committed, and after a {step} {after.commits} have"
    if after.cursor == before.cursor and step != "redo":
        assert (after.keyed, after.log) == (before.keyed, before.log), f"I8: a {step} without a commit changed the states"
