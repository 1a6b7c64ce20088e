"""A source that follows an Apache Iceberg table: it reads each row that a snapshot adds once, in order."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidegate.jobs.sources.data_files import DataFilesSource
from tidegate.jobs.sources.files.source import OnNewColumn
from tidegate.state_store.declarations.pipeline_spec import SourceKind


@dataclass(frozen=True)
class Iceberg(DataFilesSource):
    """An Iceberg table of a catalog: ``Iceberg("lake.sales.orders", schema={"shop": "string", "amount": "bigint"})``.

    `table` is ``catalog.namespace.table``; PyIceberg's own file or environment variables configure the catalog.

    The source reads the rows that the branch main has at the first plan, then those that later snapshots add. With
    `starting_snapshot`, it starts with the rows that this snapshot adds. Rewritten files (compaction) add no rows. A batch is
    the next `max_files` data files, or fewer if they would exceed `max_bytes`; it may end within a snapshot. Its metadata
    identifies each file as `Files` does, by name, size and digest or ETag.

    A snapshot that deletes or rewrites rows stops planning with SourceChanged, because these rows may have counted.
    `skip_overwrites` leaves out such snapshots, with all that they add.

    `schema` maps columns to Spark types; partition columns are declared like others. A column that was added to the table
    later is NULL in older files; one that nobody declares is told, or halts a batch, as `Files` has it by `on_new_column` and
    `ignored_columns`. Columns that were renamed, or dropped and added again, default values, data files other than
    Parquet, and row-level deletes in the snapshot that is read first are refused, with an error that names them.

    Planning raises RangeExpired if a snapshot expired, or a data file was removed, before it was planned. To go on without it,
    or with a table that was created again under its name, raise `generation` and the pipeline's version: the table is then
    read from its start, all that it has or `starting_snapshot`, and its rows count into the same states.
    """

    table: str
    schema: Mapping[str, str]
    max_files: int = 100
    max_bytes: int | None = None
    starting_snapshot: int | None = None
    skip_overwrites: bool = False
    generation: int = 1
    on_new_column: OnNewColumn = "notice"
    ignored_columns: Sequence[str] = ()
    kind: SourceKind = field(default="transactional", init=False)

    def __post_init__(self) -> None:
        """Check the declaration.

        Raises: ValueError.
        """
        if len(parts := self.table.split(".")) < 3 or not all(parts):
            raise ValueError(f"Iceberg({self.table!r}) needs a catalog, a namespace and a table, such as 'lake.sales.orders'.")
        self.check()

    @property
    def root(self) -> str:
        """No place: metadata say it."""
        return "."

    @property
    def identity(self) -> str:
        """Return what identifies the rows: table, columns and generation."""
        generation = [self.generation] if self.generation > 1 else []
        return f"iceberg {json.dumps([self.table, list(self.schema.items()), *generation])}"
