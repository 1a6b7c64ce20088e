"""state_store: whether it counts. The exactly-once protocol, all of it decided in Postgres.

I1 to I20 are the rules of docs/protocol.md, here and everywhere.

    plan     open_batches   txids and frozen metadata, write-once, before anything is read (I6)
    process  start_attempt  a larger attempt number for the batch; from now on every older attempt is inert (I4, I5)
             unbegun        the batches of a run that wait for somebody with time, and whether their thief lives; a hint
             (Spark)        COPY into this attempt's own staging tables, one stream per partition
             seal           which task attempt counts for each partition, how many rows, which digest (I7)
    commit   commit_batch   one transaction: lock the cursor, check, merge, advance, record (I1-I3, I14)

A batch goes from planned over processing and processed to committed; failed and halted are detours. No column holds this
phase: it follows from which rows exist, so it cannot contradict them.

The commit checks, under the cursor's row lock and in this order: that the database is the primary and the incarnation that
the cursor was made in (I9); whether the txid has committed, then it says so and changes nothing (I8); that its
predecessor has (I3); that the frozen metadata is intact (I6); that the newest attempt is sealed (I4); that it continues the
batch that committed last (I12); that the declaration is the registered one (I16); that staging holds exactly the sealed rows
(I7); after the merge, that every key landed (I14).

A batch is planned once. An attempt of an opaque source may cut it anew, until it commits: the new metadata belongs to the
attempt, the planned one stays. Every cut carries the digest of the metadata behind which it was made, and the commit compares
that with the digest that the cursor committed: if batch n was cut anew, n + 1 cannot commit before it was, too.

A batch that fails for good is given up by its pipeline's policy or by a person: when its turn comes, a commit without rows
takes its place, with who and why. Bad records that a pipeline sets aside are staged and sealed beside the partials, and move
into the quarantine in the commit. Each source row of a committed batch therefore counts, waits in quarantine, or is named
by a skip.

What a crash leaves behind, and who notices:

    before the COMMIT of any step    nothing; the step is repeated
    after open_batches               planned txids, which the next plan of any run takes up
    after start_attempt, in staging  staging tables that no seal names; the next attempt has its own; dropped when old
    after seal                       a processed batch; a retry finds it and does nothing
    in the COMMIT of a commit        either all or nothing; the retry locks the cursor, which waits for the old transaction
    after a commit, answer lost      the retry reports already_committed

Whoever lost a COMMIT's answer never guesses: it asks under the lock (I10).
"""

from typing import TYPE_CHECKING, Any

from state_store.settings import Settings

if TYPE_CHECKING:
    from state_store.store import StateStore

__all__ = ["Settings", "StateStore"]


def __getattr__(name: str) -> Any:
    """Load the store when it is first asked for: declarations, settings and lookups do without SQLAlchemy."""
    if name == "StateStore":
        from state_store.store import StateStore  # noqa: PLC0415

        return StateStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
