"""A source that follows a Delta Lake table: it reads each row that a version adds once, in the order of versions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tidegate.jobs.sources.data_files import DataFilesSource
from tidegate.jobs.sources.files.partition_columns import PartitionColumns
from tidegate.jobs.sources.files.source import OnNewColumn
from tidegate.state_store.declarations.pipeline_spec import SourceKind

# Delta's names and types for the columns of its change data feed.
CHANGE_TYPE, COMMIT_VERSION = "_change_type", "_commit_version"
CHANGE_COLUMNS = {CHANGE_TYPE: "string", COMMIT_VERSION: "bigint"}


@dataclass(frozen=True)
class Delta(DataFilesSource):
    """A Delta table, on a disk or in a store (docs/storage.md): ``Delta("s3a://lake/sales", schema={"shop": "string"})``.

    The source reads the newest snapshot as of the first plan, then the rows that later versions add. With `starting_version`,
    it reads no snapshot, and starts with the rows that this version adds. Rewritten files (OPTIMIZE) add no rows. A batch is
    the next `max_files` data files, or fewer if they would exceed `max_bytes`; it may end within a version. Its metadata
    identifies each file as `Files` does, by name, size and digest or ETag.

    A version that deletes or rewrites rows (DELETE, UPDATE, MERGE, overwrite) stops planning with SourceChanged, because these
    rows may have counted. `skip_change_commits` leaves out such versions, with all that they add. With `changes`, the rows are
    the changes themselves, from a table with ``delta.enableChangeDataFeed``. They have two more columns, `_change_type`
    (``insert``, ``update_preimage``, ``update_postimage`` or ``delete``) and `_commit_version`.

    `schema` maps columns to Spark types, and `partitions` does so for partition columns. A column that was added to the table
    later is NULL in older files; one that nobody declares is told, or halts a batch, as `Files` has it by `on_new_column` and
    `ignored_columns`. Column mapping, files with deletion vectors, version 2 checkpoints and shallow clones are
    refused, with an error that names them.

    Planning raises RangeExpired if a data file (by VACUUM) or a version's log was removed before it was planned. To go on
    without it, or with a table that was created again in its place, raise `generation` and the pipeline's version: the table
    is then read from its start, the snapshot or `starting_version`, and its rows count into the same states.
    """

    table: str
    schema: Mapping[str, str]
    partitions: Mapping[str, str] = field(default_factory=dict)
    max_files: int = 100
    max_bytes: int | None = None
    starting_version: int | None = None
    skip_change_commits: bool = False
    changes: bool = False
    generation: int = 1
    on_new_column: OnNewColumn = "notice"
    ignored_columns: Sequence[str] = ()
    kind: SourceKind = field(default="transactional", init=False)

    def __post_init__(self) -> None:
        """Check the declaration.

        Raises: ValueError.
        """
        self.check()
        if reserved := [name for name in (*self.schema, *self.partitions) if name.lower() in CHANGE_COLUMNS]:
            raise ValueError(f"Delta({self.table!r}) cannot declare {reserved[0]}: with changes=True it is there.")
        if self.starting_version is not None and self.starting_version < 0:
            raise ValueError(f"Delta({self.table!r}) cannot start with version {self.starting_version}: the first one is 0.")
        if self.skip_change_commits and self.changes:
            raise ValueError(f"Delta({self.table!r}) reads changes, and so leaves none out: skip_change_commits is not for it.")

    @property
    def root(self) -> str:
        """The table's folder."""
        return self.table

    @property
    def beside_files(self) -> Mapping[str, str]:
        """The columns of partitions and, with `changes`, of the change."""
        return {**self.partitions, **(CHANGE_COLUMNS if self.changes else {})}

    @cached_property
    def instants(self) -> list[str]:
        """The partition columns of type timestamp, whose values are ambiguous without a time zone."""
        return [name for name, kind in PartitionColumns(self.partitions).kinds.items() if kind.family == "timestamp"]

    @property
    def identity(self) -> str:
        """Return what identifies the rows: table, columns, whether changes are read, and generation."""
        generation = [self.generation] if self.generation > 1 else []
        parts = [self.table, list(self.schema.items()), list(self.partitions.items()), self.changes, *generation]
        return f"delta {json.dumps(parts)}"
