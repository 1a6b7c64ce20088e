"""Plans of a source without a ledger."""

from typing import Any

from tidegate.jobs.sources import Source
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.state_store import Settings

SCHEMA = {"name": "string", "amount": "int"}


def plan(settings: Settings, source: Source, previous: Any = None, current: Any = None) -> Any:
    """Return the metadata of the batch after a batch, of a plan of its own; None if there is nothing new."""
    return coordinator_of(source, settings).initialize_transaction(1 if previous is None else 2, previous, current)


def batches(settings: Settings, source: Source, previous: Any = None) -> list[Any]:
    """Return the metadata of all batches after a batch, of a plan of its own for each."""
    found = []
    while previous := plan(settings, source, previous):
        found.append(previous)
    return found


def names(metadata: Any) -> list[str]:
    """Return the names of the files of a batch."""
    return [file["name"] for file in metadata.get("files") or metadata["data_files"]]
