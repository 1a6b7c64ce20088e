"""What has become of an attempt at a batch, as `inspect` and the page show it."""

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tidegate.state_store.read_ledger.batch_status import BatchHistory

Outcome = Literal["committed", "skipped", "failed", "fenced", "sealed", "in work"]


def outcome(attempt: dict[str, Any], history: "BatchHistory") -> Outcome:
    """Return what has become of an attempt."""
    commit = history.commit
    if commit is not None and commit["attempt"] == attempt["attempt"]:
        return "skipped" if commit["skipped_reason"] is not None else "committed"
    is_newest = attempt["attempt"] == history.status.attempt
    if not is_newest and (attempt["failed_at"] is None or attempt["error"].startswith("ATTEMPT_FENCED")):
        return "fenced"
    if attempt["failed_at"] is not None:
        return "failed"
    return "sealed" if attempt["sealed_at"] is not None else "in work"
