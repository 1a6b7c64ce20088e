"""The exactly-once protocol: Postgres alone decides whether a batch counts: whether its rows are in the states.

I1 to I24 are the rules of docs/protocol.md. A txid is a batch's number, an attempt a try at it, a partial its result for one
key; the cursor is the pipeline's row with the last committed txid.

    plan     open_batches   txids and frozen metadata, write-once, before anything is read (I6)
    process  start_attempt  a larger attempt number for the batch; from now on every older attempt is fenced (I4, I5)
             next_unbegun   a batch that no task has begun, for tasks of the run that are idle
             (Spark)        COPY into this attempt's own staging tables, one stream per partition
             seal           which task attempt counts for each partition, how many rows, which digest (I7)
    commit   commit_batch   one transaction: lock the cursor, check, merge, advance, record (I1-I3, I14)

The commit and the start of an attempt lock, read their facts in one statement (`commit.commit_facts`), and let pure functions
decide (`commit.verdicts`, `turns.begin_attempt`); turns, which are hints, decide so, too, without a lock (`turns.batch_turns`).

What a crash leaves, and what follows:

    before the COMMIT of any step    nothing; the step is repeated
    after open_batches               planned txids, which the next plan of any run takes up
    after start_attempt, in staging  staging tables without a seal; the next attempt has its own; they are dropped when old
    after seal                       a processed batch; a retry finds it and does nothing
    in the COMMIT of a commit        all or nothing; the retry locks the cursor, which waits for the old transaction
    after a commit, answer lost      the retry reports already_committed

A caller that lost the answer to a COMMIT never guesses: it asks under the lock (I10).

The rooms; each imports only those above it, and `store` all of them:

    base              settings, the project folder, errors
    connections       pools, transactions, steps of them, locks, COPY; errors by SQLSTATE
    declarations      pipelines, states, columns and windows, as they are declared
    ledger            its tables and schema; batches, plans, cursors, files that have counted, the witness
    states            the tables of states: what they should be, whether they still are; rows by key
    attempt           an attempt's row and heartbeat, its staged rows, its seal
    commit            the ordered commit, and all that it does to states
    operate           what operators do, each action with its record
    turns             when a batch may begin or commit, and how an attempt at it begins
    read_ledger       what reports, the page and metrics read
    pipeline_changes  a pipeline is registered, declared otherwise, rebuilt or retired
    read_states       rows for programs, named queries and transforms
"""

from typing import TYPE_CHECKING, Any

from tidegate.state_store.base.settings import Settings

if TYPE_CHECKING:
    from tidegate.state_store.store import StateStore

__all__ = ["Settings", "StateStore"]


def __getattr__(name: str) -> Any:
    """Load the store on first use: declarations, settings and lookups do not need SQLAlchemy."""
    if name == "StateStore":
        from tidegate.state_store.store import StateStore  # noqa: PLC0415

        return StateStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ != "tidegate.state_store":  # a checkout on the path has this folder, too: it would be loaded twice
    raise ImportError("Import tidegate.state_store: there is no package state_store.")
