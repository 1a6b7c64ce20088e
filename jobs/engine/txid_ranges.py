"""Which txids a run may cover, and how a chain of Dag runs works off a backlog, each with a bounded number of batches.

Airflow's scheduler looks at all task instances of a run in each of its loops, so a run of a thousand batches would make every
other Dag wait. The plan of a run that leaves batches over queues the next run; Airflow starts that when this one has ended.
The names of both follow from each other, so a plan that is repeated queues no second one, and a client can follow the chain.
"""

import re
from collections.abc import Mapping

from tidegate.state_store.base.errors import RangeRefused

# Airflow maps at most 1,024 tasks by default; the next run covers further batches.
MAX_BATCHES_PER_RUN = 1000
# More batches would slow the scheduler's loop down for all Dags, fewer would pay for the begin and end of a run too often
# (docs/performance.md).
BATCHES_PER_RUN = 100
MAX_RUN_ID = 250  # characters, Airflow's limit
_CONTINUED = re.compile(r"continued_(\d+)__(.+)", re.DOTALL)


def check_range(
    pipeline: str, committed: int, from_txid: int | None, to_txid: int | None, max_batches: int | None = None
) -> None:
    """Refuse numbers below 1, a range that ends before it begins, and one that leaves out earlier uncommitted txids.

    Raises: RangeRefused.
    """
    for name, value in (("from_txid", from_txid), ("to_txid", to_txid), ("max_batches", max_batches)):
        if value is not None and value < 1:
            raise RangeRefused(f"{name} is {value}; it must be at least 1.")
    if from_txid is not None and to_txid is not None and from_txid > to_txid:
        raise RangeRefused(f"The range is upside down: from_txid {from_txid} is above to_txid {to_txid}.")
    if from_txid is not None and from_txid > committed + 1:
        gap = f"txid {committed + 1}" if from_txid == committed + 2 else f"txids {committed + 1} to {from_txid - 1}"
        raise RangeRefused(
            f"{pipeline} cannot start at txid {from_txid}: {gap} would be left out, and commits go in order. "
            f"Start at {committed + 1}."
        )


def next_run(run_id: str) -> str:
    """Return the name of the run that goes on where this one ends."""
    number, first = _parsed(run_id)
    return f"continued_{number + 1}__{first}"[:MAX_RUN_ID]


def run_before(run_id: str) -> str | None:
    """Return the name of the run that this one goes on from; None if it goes on from none."""
    number, first = _parsed(run_id)
    if number == 1:
        return None
    return first if number == 2 else f"continued_{number - 1}__{first}"[:MAX_RUN_ID]


def parameters_of_next(given: Mapping[str, int | None], txids: list[int], limit: int) -> dict[str, int] | None:
    """Return the parameters of the next run, after one that covers these txids and at most `limit`; None if it needs none.

    A run that covers fewer than it could has found the end of its range, or of the source's data.
    """
    if len(txids) < limit or txids[-1] == given.get("to_txid"):
        return None
    rest = dict(given)
    if (most := given.get("max_batches")) is not None:
        if most <= len(txids):
            return None
        rest["max_batches"] = most - len(txids)
    if given.get("from_txid") is not None:
        rest["from_txid"] = txids[-1] + 1
    return {name: value for name, value in rest.items() if value is not None}


def _parsed(run_id: str) -> tuple[int, str]:
    """Return a run's number in its chain, and the name of the first run."""
    found = _CONTINUED.fullmatch(run_id)
    return (int(found[1]), found[2]) if found else (1, run_id)
