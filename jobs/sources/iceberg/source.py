"""A source that follows a table of Apache Iceberg: each row that a snapshot adds is read once, in their order."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jobs.sources import Dataset
from jobs.sources.data_files import DataFilesSource
from jobs.sources.files.source import Files
from state_store.declaration import SourceKind, SourceMetadata
from state_store.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from jobs.sources.iceberg.plan import IcebergCoordinator
    from jobs.sources.iceberg.read import IcebergReader


@dataclass(frozen=True)
class Iceberg(DataFilesSource):
    """An Iceberg table of a catalog: ``Iceberg("lake.sales.orders", schema={"shop": "string", "amount": "bigint"})``.

    `table` is the name of a catalog, as PyIceberg knows it from its own file or environment, and that of a table in it.

    The first plan takes the rows that the table's branch main has at that moment, and what follows are the rows that later
    snapshots add. With `starting_snapshot` the first rows are those that this snapshot adds. Files that are only written again
    (compaction) add nothing. A batch is the next `max_files` data files, or fewer when they would exceed `max_bytes`; it may
    end within a snapshot, and its metadata name each file with its identity, as those of `Files` do.

    A snapshot that deletes or rewrites rows stops planning with SourceChanged, because these rows may have counted.
    `skip_overwrites` leaves out such snapshots, with all that they add.

    `schema` maps columns to Spark types. Columns by which the table is partitioned are columns like others. One that was added
    to the table later is NULL in older files. Columns that were renamed, or dropped and added again, default values, and data
    files other than Parquet are refused by name; so are deletes of single rows, in the snapshot that is read first.

    A snapshot that was expired, or a data file that was removed, before it was planned is RangeExpired. To go on without it,
    or with a table that was made again under its name, raise `generation` and the pipeline's version: the table is then begun
    again, by what it has or at `starting_snapshot`, and what it has there counts into the same states.
    """

    table: str
    schema: Mapping[str, str]
    max_files: int = 100
    max_bytes: int | None = None
    starting_snapshot: int | None = None
    skip_overwrites: bool = False
    generation: int = 1
    kind: SourceKind = field(default="transactional", init=False)

    def __post_init__(self) -> None:
        """Check the declaration.

        Raises: ValueError.
        """
        if len(parts := self.table.split(".")) < 3 or not all(parts):
            raise ValueError(f"Iceberg({self.table!r}) needs a catalog, a namespace and a table, such as 'lake.sales.orders'.")
        try:
            self.files(".")  # it checks columns and numbers
        except ValueError as error:
            raise ValueError(str(error).replace("Files('.')", f"Iceberg({self.table!r})", 1)) from None
        if self.generation < 1:
            raise ValueError(f"Iceberg({self.table!r}) cannot have generation {self.generation}: the first one is 1.")

    def files(self, root: str) -> Files:
        """Return the data files below a place, as they are read."""
        return Files(root, glob="**", schema=self.schema, missing="null", max_files=self.max_files, max_bytes=self.max_bytes)

    @property
    def identity(self) -> str:
        """Return what identifies the rows: the table and the columns."""
        generation = [self.generation] if self.generation > 1 else []
        return f"iceberg {json.dumps([self.table, list(self.schema.items()), *generation])}"

    def coordinator(self, settings: Settings) -> "IcebergCoordinator":
        """Return a coordinator that loads the table from its catalog as it plans."""
        from jobs.sources.iceberg.plan import IcebergCoordinator  # noqa: PLC0415 - a declaration must not load pyarrow

        return IcebergCoordinator(self, settings)

    def emitter(self, spark: "SparkSession", settings: Settings) -> "IcebergReader":
        """Return a reader of the data files that the metadata name."""
        from jobs.sources.iceberg.read import IcebergReader  # noqa: PLC0415

        return IcebergReader(self, spark, settings)

    def datasets(self, metadata: SourceMetadata, settings: Settings) -> Sequence[Dataset]:
        """Return the place of the table's files, and the batch's data files as the locations in it."""
        return self.files(metadata["root"]).datasets({"files": metadata["data_files"]}, settings)
