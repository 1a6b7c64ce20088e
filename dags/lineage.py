"""OpenLineage: which data a batch reads, and which states it goes into, for Airflow's provider.

Airflow's provider asks the tasks for this (`tidegate.dags.batch_tasks`) where it is installed and has a transport. Nothing else
imports this module, so Tidegate works without the provider. The custom facet's schema: docs/schemas/TidegateBatchRunFacet.json.
"""

import attr
from airflow.providers.openlineage.extractors import OperatorLineage
from openlineage.client.event_v2 import InputDataset, OutputDataset
from openlineage.client.facet_v2 import InputDatasetFacet, RunFacet
from openlineage.client.generated.base_subset_dataset import InputSubsetInputDatasetFacet, LocationSubsetCondition
from openlineage.client.generated.schema_dataset import SchemaDatasetFacet, SchemaDatasetFacetFields

from tidegate.jobs.registry import find_pipeline
from tidegate.jobs.sources import Dataset
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.declarations.pipeline_spec import StateSpec
from tidegate.state_store.ledger.batches import QUARANTINED

MOST_LOCATIONS = 1000  # of one batch's files: an event is meant to be small


@attr.define
class TidegateBatchRunFacet(RunFacet):
    """The batch that a task works on; `attempt` is its newest, None before the first, `phase` as in `tidegate inspect`."""

    pipeline: str
    txid: int
    phase: str
    attempt: int | None = None

    @staticmethod
    def _get_schema() -> str:
        return "urn:tidegate:schemas:TidegateBatchRunFacet:1-0-0"


def lineage_of(pipeline_name: str, txid: int) -> OperatorLineage:
    """Return a batch's inputs, its pipeline's state tables, and the batch as a facet, from the ledger as it is now.

    Raises: UnknownBatch, StoreUnavailable: the provider logs it, and sends an event without datasets.
    """
    settings, pipeline = Settings.load(), find_pipeline(pipeline_name)
    with StateStore.connect(settings) as store:
        batch = store.batch_history(pipeline_name, txid)
    server, database = f"postgres://{settings.pg_host}:{settings.pg_port}", settings.pg_database
    if QUARANTINED in batch.source_metadata:
        read = [Dataset(server, f"{database}.tidegate.quarantine")]
        if pipeline.source.input_names:  # with the references that the records are joined with
            read += pipeline.source.datasets(batch.source_metadata, settings)
    else:
        read = list(pipeline.source.datasets(batch.source_metadata, settings))
    facet = TidegateBatchRunFacet(pipeline_name, txid, batch.status.phase, batch.status.attempt or None)
    return OperatorLineage(
        inputs=[_input(dataset) for dataset in read],
        outputs=[
            OutputDataset(server, f"{database}.state.{state.name}", facets={"schema": _columns(state)})
            for state in pipeline.spec.readable
        ],
        run_facets={"tidegate_batch": facet},
    )


def _input(dataset: Dataset) -> InputDataset:
    """Return a dataset with the places of the parts that are read, if there are such, and not too many."""
    facets: dict[str, InputDatasetFacet] = {}
    if 0 < len(dataset.locations) <= MOST_LOCATIONS:
        facets["subset"] = InputSubsetInputDatasetFacet(LocationSubsetCondition(list(dataset.locations)))
    return InputDataset(dataset.namespace, dataset.name, inputFacets=facets)


def _columns(state: StateSpec) -> SchemaDatasetFacet:
    return SchemaDatasetFacet([SchemaDatasetFacetFields(c.name, type=c.type.name) for c in state.shown])
