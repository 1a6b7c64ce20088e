"""The txid ranges that a run may cover."""

import pytest

from tidegate.jobs.engine.txid_ranges import check_range
from tidegate.state_store.base.errors import RangeRefused


@pytest.mark.parametrize(
    ("committed", "from_txid", "to_txid", "max_batches"),
    [
        (0, None, None, None),
        (0, 1, None, None),
        (0, 1, 1, 1),
        (5, 6, 9, None),
        (5, 1, 2, None),
        (5, None, 3, 2),
        (5, 5, 6, None),
    ],
)
def test_a_range_that_starts_at_or_before_the_next_txid_is_accepted(
    committed: int, from_txid: int | None, to_txid: int | None, max_batches: int | None
) -> None:
    """Committed txids may be part of a range; they are left alone."""
    check_range("flights", committed, from_txid, to_txid, max_batches)


@pytest.mark.parametrize(
    ("committed", "from_txid", "to_txid", "max_batches", "message"),
    [
        (0, 9, 3, None, "The range is upside down: from_txid 9 is above to_txid 3."),
        (5, 7, None, None, "flights cannot start at txid 7: txid 6 would be left out, and commits go in order. Start at 6."),
        (5, 9, 9, None, "flights cannot start at txid 9: txids 6 to 8 would be left out, and commits go in order. Start at 6."),
        (5, 0, None, None, "from_txid is 0; it must be at least 1."),
        (5, None, -3, None, "to_txid is -3; it must be at least 1."),
        (5, None, None, 0, "max_batches is 0; it must be at least 1."),
    ],
)
def test_any_other_range_is_refused_with_a_reason(
    committed: int, from_txid: int | None, to_txid: int | None, max_batches: int | None, message: str
) -> None:
    """Upside down, below 1, or with a gap before it: the message has the numbers and names the gap."""
    with pytest.raises(RangeRefused) as refusal:
        check_range("flights", committed, from_txid, to_txid, max_batches)
    assert str(refusal.value) == message
    assert refusal.value.pipeline == "flights"
