"""state_store: whether it counts."""

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
