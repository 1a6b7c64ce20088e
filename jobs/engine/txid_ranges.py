"""The txid ranges that a run may cover."""

from tidegate.state_store.base.errors import RangeRefused

# Airflow maps at most 1,024 tasks by default; the next run covers further batches.
MAX_BATCHES_PER_RUN = 1000


def check_range(
    pipeline: str, committed: int, from_txid: int | None, to_txid: int | None, max_batches: int | None = None
) -> None:
    """Refuse numbers below 1, a range that ends before it begins, and one that leaves out earlier uncommitted txids.

    Raises: RangeRefused.
    """
    for name, value in (("from_txid", from_txid), ("to_txid", to_txid), ("max_batches", max_batches)):
        if value is not None and value < 1:
            raise RangeRefused(f"{name} is {value}; it must be at least 1.", pipeline=pipeline)
    if from_txid is not None and to_txid is not None and from_txid > to_txid:
        raise RangeRefused(f"The range is upside down: from_txid {from_txid} is above to_txid {to_txid}.", pipeline=pipeline)
    if from_txid is not None and from_txid > committed + 1:
        gap = f"txid {committed + 1}" if from_txid == committed + 2 else f"txids {committed + 1} to {from_txid - 1}"
        raise RangeRefused(
            f"{pipeline} cannot start at txid {from_txid}: {gap} would be left out, and commits go in order. "
            f"Start at {committed + 1}.",
            pipeline=pipeline,
            txid=from_txid,
        )
