"""Binds each declaration of a source to the coordinator that plans its batches and the emitter that reads them.

A declaration knows neither of them; both know the declaration. An author's own source names them itself, by the methods
`coordinator` and `emitter` (`Source`). Imports stand in functions, so that a plan loads no pyspark, and no source the libraries
of another one.
"""

# ruff: noqa: PLC0415
from typing import TYPE_CHECKING

from tidegate.jobs.sources import Coordinator, Emitter, Source
from tidegate.jobs.sources.delta.source import Delta
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.iceberg.source import Iceberg
from tidegate.jobs.sources.inputs.source import Inputs
from tidegate.jobs.sources.kafka.source import Kafka
from tidegate.jobs.sources.postgres.source import PostgresTable
from tidegate.state_store.base.errors import DeclarationInvalid
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def coordinator_of(source: Source, settings: Settings) -> Coordinator:
    """Return the coordinator of a source for one plan.

    Raises: SourceUnavailable, SourceUnreadable, SettingsInvalid; DeclarationInvalid if there is none.
    """
    if hasattr(source, "coordinator"):
        own: Coordinator = source.coordinator(settings)
        return own
    match source:
        case Files():
            return _coordinator_of_files(source, settings)
        case Kafka():
            from tidegate.jobs.sources.kafka.plan import KafkaCoordinator

            return KafkaCoordinator(source, settings)
        case Delta():
            from tidegate.jobs.sources.delta.plan import DeltaCoordinator

            return DeltaCoordinator(source, settings)
        case Iceberg():
            from tidegate.jobs.sources.iceberg.plan import IcebergCoordinator

            return IcebergCoordinator(source, settings)
        case PostgresTable():
            from tidegate.jobs.sources.postgres.plan import PostgresCoordinator

            return PostgresCoordinator(source, settings)
        case Inputs():
            from tidegate.jobs.sources.inputs.plan import InputsCoordinator

            return InputsCoordinator(source, settings, coordinator_of)
    raise DeclarationInvalid(f"{type(source).__name__} has no coordinator: define coordinator(settings).")


def _coordinator_of_files(source: Files, settings: Settings) -> Coordinator:
    from tidegate.jobs.sources.files.plan import FolderCoordinator, ObjectsCoordinator
    from tidegate.jobs.sources.files.stores.manifest_plan import ManifestsCoordinator

    if source.manifests is not None:
        return ManifestsCoordinator(source, settings)
    return (ObjectsCoordinator if source.objects() else FolderCoordinator)(source, settings)


def emitter_of(source: Source, spark: "SparkSession", settings: Settings) -> Emitter:
    """Return the emitter of a source for one attempt.

    Raises: DeclarationInvalid if there is none.
    """
    if hasattr(source, "emitter"):
        own: Emitter = source.emitter(spark, settings)
        return own
    match source:
        case Files():
            return _reader_of_files(source, spark, settings)
        case Delta() | Iceberg():
            from tidegate.jobs.sources.files.formats.parquet import ParquetReader

            return ParquetReader(spark, source.files(), settings.home, "data_files")
        case Kafka():
            from tidegate.jobs.sources.kafka.read import KafkaReader

            return KafkaReader(spark, source, settings)
        case PostgresTable():
            from tidegate.jobs.sources.postgres.read import PostgresReader

            return PostgresReader(source, spark, settings)
        case Inputs():
            from tidegate.jobs.sources.inputs.read import InputsEmitter

            return InputsEmitter(source, spark, lambda part: emitter_of(part, spark, settings))
    raise DeclarationInvalid(f"{type(source).__name__} has no emitter: define emitter(spark, settings).")


def _reader_of_files(files: Files, spark: "SparkSession", settings: Settings) -> Emitter:
    from tidegate.jobs.sources.files.formats.parquet import ParquetReader
    from tidegate.jobs.sources.files.formats.text_files.text_reader import TextFileReader

    return (ParquetReader if files.format == "parquet" else TextFileReader)(spark, files, settings.home)


def replayed_with(source: Source, settings: Settings) -> SourceMetadata:
    """Return what is frozen with a batch of quarantined records: the versions, as of now, of what they are joined with.

    Raises: SourceUnavailable, SourceUnreadable.
    """
    if not isinstance(source, Inputs):
        return {}
    from tidegate.jobs.sources.inputs.plan import versions_now

    return versions_now(source, settings, coordinator_of)
