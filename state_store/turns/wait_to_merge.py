"""How long a ready batch is held back for others that are being processed: merged together, they take less time."""

# A ready batch waits for this multiple of the last merge's duration: a long time after a large merge, hardly any after a small
# one. It never waits longer than the limit, even if the machine's clock was changed since the last merge or the seal.
MERGE_PATIENCE_FACTOR, LONGEST_MERGE_WAIT_SECONDS = 3, 180


def has_waited_enough(sealed_seconds: float, last_merge_seconds: float) -> bool:
    """Return whether a batch that was sealed so long ago waits no longer.

    A negative time means that the clock was set back: the time waited is unknown, so the batch waits no longer.
    """
    patience = min(MERGE_PATIENCE_FACTOR * last_merge_seconds, LONGEST_MERGE_WAIT_SECONDS)
    return not 0 <= sealed_seconds < patience
