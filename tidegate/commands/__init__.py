"""The verbs, by subject: stack, pipelines and tables, runs, inspection, operations, quarantine."""

from typing import TYPE_CHECKING

import click

from tidegate import completion
from tidegate.state_store.base.settings import Settings

if TYPE_CHECKING:
    from tidegate.state_store import StateStore

LARGEST = 10**15  # beyond any txid or number of rows, and well within the range of Postgres' and Airflow's integers


AT_LEAST_ONE = click.IntRange(1, LARGEST)  # a txid or a count

pipeline_name = click.argument(
    "pipeline", shell_complete=completion.pipelines, help="The pipeline's name; see: tidegate pipelines"
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of tables.")
log_json = click.option("--log-json", is_flag=True, help="Show the engine's log as JSON lines, for programs.")
yes = click.option("--yes", is_flag=True, help="Do it; without this, only show what would be done, with exit code 2.")
verbose = click.option("--verbose", "-v", is_flag=True, help="Show the engine's log.")


def connected(settings: Settings | None = None, *, as_owner: bool = False) -> "StateStore":
    """Return a store, for the caller to close; SQLAlchemy is loaded only here, as short verbs do without."""
    from tidegate.state_store import StateStore  # noqa: PLC0415

    settings = settings or Settings.load()
    return StateStore.connect(settings, user=settings.pg_owner if as_owner else None)
