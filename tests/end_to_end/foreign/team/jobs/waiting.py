"""A trigger of the other team: it runs in the process in which Tidegate's batches wait."""

from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from jobs.probes import note


class Glance(BaseTrigger):
    """Ends at once."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return where Airflow's triggerer finds this class."""
        return "jobs.waiting.Glance", {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Note what the triggerer has imported."""
        note("triggerer")
        yield TriggerEvent("seen")
