"""state_store: whether it counts."""

from state_store.settings import Settings
from state_store.store import StateStore

__all__ = ["Settings", "StateStore"]
