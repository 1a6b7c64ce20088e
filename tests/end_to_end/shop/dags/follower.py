"""A Dag of other people: it runs when the states of kinds have advanced, and notes what its event says."""

from airflow.sdk import Asset, dag, task


@dag(schedule=[Asset("tidegate://pipelines/kinds")])
def follower() -> None:
    """Follow kinds."""

    @task
    def look(triggering_asset_events=None) -> list[dict]:
        """Return what the events say."""
        return [event.extra for events in triggering_asset_events.values() for event in events]

    look()


follower()
