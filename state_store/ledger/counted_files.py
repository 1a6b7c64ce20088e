"""The files of committed batches, one row each, so that a file's content counts once (I12 in docs/protocol.md).

A file is identified by name and content: it stays the same file when it is moved away and back, restored, or gets a new time.
Rows are written in the commit's own transaction, under the cursor's lock; the primary key refuses files that have counted. The
table grows with the input, as a file that comes back after years is still known, so a row holds little more than what
identifies the file. Until a planned batch commits, its files are only in its metadata, because its source may still plan it
differently.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import ARRAY, insert

from tidegate.state_store.base.errors import SourceChanged, Unprocessed, skip_command
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, SourceMetadata
from tidegate.state_store.ledger import tables
from tidegate.state_store.ledger.batches import QUARANTINED, BatchInput

# Where the metadata of a batch lists its files: name, size, mtime_ns, inode (of objects: none) and sha256 of each.
FILES = "files"
AFTER = "after"  # where a source that takes files in the order of their names keeps the last name so far
INPUTS = "inputs"  # where the metadata of a pipeline with several inputs has that of each, by its name
LARGEST = 2**63 - 1
_COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {
    "name": sa.Text(),
    "sha256": sa.Text(),
    "size": sa.BigInteger(),
    "mtime_ns": sa.BigInteger(),
    "inode": sa.Text(),
    "txid": sa.BigInteger(),
}


@dataclass(frozen=True)
class TakenFile:
    """A file that a batch reads or has read: the planned content, and the progress of the batch.

    Time and inode, of which objects have none, are those of when the file was last looked at.
    """

    name: str
    sha256: str
    size: int
    mtime_ns: int
    txid: int
    is_committed: bool
    is_done: bool  # the source has learned of the commit and, if it moves files away, has moved this one
    inode: str | None = None
    is_skipped: bool = False  # its batch has committed without rows

    @property
    def stamp(self) -> tuple[int, int, str | None]:
        """What shows without reading the file that it may have changed, as of when it was last looked at."""
        return self.size, self.mtime_ns, self.inode


def last_counted(files: Sequence[TakenFile]) -> TakenFile | None:
    """Return the newest of some files that counts, or will; None if the batches of all were skipped."""
    return max((file for file in files if not file.is_skipped), key=lambda file: file.txid, default=None)


def files_of(batch_input: BatchInput) -> Sequence[Mapping[str, Any]]:
    """Return the files that a batch reads: none if it replays quarantined records, or its source has none."""
    return () if QUARANTINED in batch_input.metadata else files_in(batch_input.metadata)


def files_in(metadata: SourceMetadata) -> Sequence[Mapping[str, Any]]:
    """Return the files that metadata lists; with several inputs, their names begin with the input's."""
    files: Sequence[Mapping[str, Any]] = metadata.get(FILES, ())
    if not isinstance(metadata.get(INPUTS), dict):
        return files
    slices = metadata[INPUTS].items()
    return [{**file, "name": name_in(name, file["name"])} for name, part in slices for file in part.get(FILES, ())]


def name_in(input_name: str, file_name: str) -> str:
    """Return the ledger's name of an input's file: two inputs may have files of the same name."""
    return f"{input_name}/{file_name}"


def write(connection: Connection, spec: PipelineSpec, inputs: Sequence[BatchInput], *, are_skipped: bool = False) -> None:
    """Record the files, if any, of batches that are being committed. The caller has locked the cursor.

    Of skipped batches, files that have counted before stay as they are recorded.

    Raises: Unprocessed if a file has counted before and the source can plan the batch again; SourceChanged if it cannot.
    """
    if not spec.keeps_files:
        return
    files = [{**file, "txid": each.txid} for each in inputs for file in files_of(each)]
    if not files:
        return
    rows = _as_table(files)
    digest = sa.func.decode(rows.c.sha256, "hex")
    columns = [sa.literal(spec.name), rows.c.name, digest, rows.c.size, rows.c.mtime_ns, rows.c.inode, rows.c.txid]
    names = ["pipeline", "name", "sha256", "size", "mtime_ns", "inode", "txid"]
    statement = insert(tables.source_file).from_select(names, sa.select(*columns)).on_conflict_do_nothing()
    if connection.execute(statement).rowcount != len(files) and not are_skipped:
        raise _counted_before(connection, spec, rows, inputs[0].txid)


def _counted_before(
    connection: Connection, spec: PipelineSpec, rows: sa.TableValuedAlias, first_txid: int
) -> SourceChanged | Unprocessed:
    f = tables.source_file.c
    same = (f.name == rows.c.name, f.sha256 == sa.func.decode(rows.c.sha256, "hex"), f.txid != rows.c.txid)
    again = sa.select(f.name, f.txid, rows.c.txid.label("new_txid")).where(f.pipeline == spec.name, *same)
    old = connection.execute(again.order_by(f.name).limit(1)).one_or_none()
    txid = old.new_txid if old else first_txid
    what = f"{old.name} has counted in txid {old.txid}, with the same content." if old else "a file is listed twice."
    if spec.source_kind == "transactional":
        return SourceChanged(
            f"{spec.name} {txid}: {what} It does not count again. Give the batch up: {skip_command(spec.name, txid)}"
        )
    return Unprocessed(f"{spec.name} {txid}: {what} The batch is planned and processed again.")


def take_back(connection: Connection, pipeline: str, txid: int) -> None:
    """Remove the files of a batch that is being redone."""
    f = tables.source_file.c
    connection.execute(sa.delete(tables.source_file).where(f.pipeline == pipeline, f.txid == txid))


def counted(connection: Connection, pipeline: str, names: Sequence[str], before_txid: int) -> dict[str, list[TakenFile]]:
    """Return the files with these names that have counted, or were skipped, in batches before a txid."""
    by_name: dict[str, list[TakenFile]] = {}
    for file in _taken(connection, pipeline, before_txid, "name", names):
        by_name.setdefault(file.name, []).append(file)
    return by_name


def counted_of_times(
    connection: Connection, pipeline: str, times: Collection[int], inodes: Collection[str], before_txid: int
) -> list[TakenFile]:
    """Return the files that have counted, or were skipped, in batches before a txid, and that `may_be_same`."""
    f, known = tables.source_file.c, [time for time in times if abs(time) <= LARGEST]
    numbers = sa.cast(list(inodes), ARRAY(sa.Text()))
    is_one_of = sa.or_(f.mtime_ns % 10**9 != 0, sa.func.split_part(f.inode, ".", 1) == sa.any_(numbers))
    return list(_taken(connection, pipeline, before_txid, "mtime_ns", known, is_one_of))


def may_be_same(file: TakenFile, times: Collection[int], inodes: Collection[str]) -> bool:
    """Return whether a file has one of these times, in nanoseconds, and, with whole seconds, one of these inode numbers.

    Any number of files may have the same time of whole seconds.
    """
    return file.mtime_ns in times and (file.mtime_ns % 10**9 != 0 or (file.inode or "").partition(".")[0] in inodes)


def _taken(
    connection: Connection, pipeline: str, before_txid: int, column: str, values: Sequence[Any], *conditions: Any
) -> Iterator[TakenFile]:
    f, b, k = tables.source_file.c, tables.batch.c, tables.commit.c
    array = sa.cast(list(values), ARRAY(_COLUMNS[column]))
    requested = sa.func.unnest(array).table_valued("value").render_derived(name="requested")
    statement = (
        sa.select(
            f.name,
            sa.func.encode(f.sha256, "hex").label("sha256"),
            f.size,
            f.mtime_ns,
            f.txid,
            sa.true().label("is_committed"),
            b.acked_at.is_not(None).label("is_done"),
            f.inode,
            k.skipped_reason.is_not(None).label("is_skipped"),
        )
        .join_from(
            requested, tables.source_file, sa.and_(f.pipeline == pipeline, f[column] == requested.c.value, f.txid < before_txid)
        )
        .join(tables.batch, tables.same_batch(tables.batch, tables.source_file))
        .outerjoin(tables.commit, tables.same_batch(tables.commit, tables.source_file))
        .where(*conditions)
    )
    for row in connection.execute(statement):
        yield TakenFile(*row)


def planned(inputs: Sequence[BatchInput]) -> dict[str, list[TakenFile]]:
    """Return the files of batches that have not committed, by their names."""
    by_name: dict[str, list[TakenFile]] = {}
    for each in inputs:
        for file in files_of(each):
            identity = file["name"], file["sha256"], file["size"], file["mtime_ns"]
            taken = TakenFile(*identity, each.txid, is_committed=False, is_done=False, inode=file.get("inode"))
            by_name.setdefault(file["name"], []).append(taken)
    return by_name


def note_times(connection: Connection, pipeline: str, files: Sequence[TakenFile]) -> None:
    """Record new times and inodes of unchanged files, so that these are not read again."""
    if not files:
        return
    rows = _as_table([asdict(file) for file in files])
    f = tables.source_file.c
    same = (f.pipeline == pipeline, f.name == rows.c.name, f.sha256 == sa.func.decode(rows.c.sha256, "hex"))
    connection.execute(sa.update(tables.source_file).where(*same).values(mtime_ns=rows.c.mtime_ns, inode=rows.c.inode))


def _as_table(files: Sequence[Mapping[str, Any]]) -> sa.TableValuedAlias:
    """Return files as a table for a statement; times are clamped to the range of a bigint."""
    columns: dict[str, list[Any]] = {name: [file.get(name) for file in files] for name in _COLUMNS}
    columns["mtime_ns"] = [max(-LARGEST, min(LARGEST, time)) for time in columns["mtime_ns"]]
    arrays = [sa.cast(columns[name], ARRAY(kind)) for name, kind in _COLUMNS.items()]
    table = sa.func.unnest(*arrays).table_valued(*(sa.column(name, kind) for name, kind in _COLUMNS.items()))
    return table.render_derived(name="given")
