"""Plans ranges of a table's settled rows, and checks that no row has come late for the ranges before."""

from dataclasses import dataclass
from math import ceil
from typing import Any

from psycopg2 import sql

from tidegate.jobs.sources import Coordinator
from tidegate.jobs.sources.postgres.late_rows import (
    GAPS,
    check_altered,
    check_drawn,
    check_gaps,
    check_in_time,
    check_keys,
    check_newest_range,
    check_sequence,
    check_times,
    gaps_of,
)
from tidegate.jobs.sources.postgres.refused_queries import check_query
from tidegate.jobs.sources.postgres.seen_by_plans import PartitionTables, attached, check_attached, partitions_of, snapshot_of
from tidegate.jobs.sources.postgres.settled_rows import highest_key, settled_by_clock, settled_by_sequence
from tidegate.jobs.sources.postgres.source import PostgresTable, check_range, is_range
from tidegate.jobs.sources.postgres.source_connection import check_primary, connected, transaction
from tidegate.jobs.sources.postgres.table_origin import (
    START_AGAIN,
    Origin,
    Sequence,
    check_same_origin,
    check_timeline,
    drawn_by,
    read_origin,
    read_sequences,
    read_timeline,
)
from tidegate.jobs.sources.postgres.table_query import Position
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

# Entries that a batch without rows takes over from the batch before it.
_KEPT = ("gaps", "snapshot", "attached", "origin")


class PostgresCoordinator(Coordinator):
    """Plans ranges; all ranges of one plan are among the rows that were settled when it began."""

    def __init__(self, source: PostgresTable, settings: Settings) -> None:
        self._source = source
        # On another timeline, as nothing can be lost there.
        self._goes_on = source.failover == "go-on" or (source.connection is None and settings.pg_failover == "go-on")
        self._query = source.selection
        self._conninfo = source.conninfo(settings, "plan")
        self._survey: _Survey | None = None

    def initialize_transaction(
        self,
        txid: int,  # noqa: ARG002 - ranges follow each other by the key alone
        previous_metadata: SourceMetadata | None,
        current_metadata: SourceMetadata | None,
    ) -> SourceMetadata | None:
        """Return the next range of settled rows, None if there are none.

        A saved range is kept, unless the range before it now ends elsewhere.

        Raises: SourceUnavailable, SourceUnreadable, SourceChanged, AccessRefused, MalformedRecord for rows without a key.
        """
        if current_metadata is not None and self._source.kind == "transactional":
            return current_metadata
        check_range(current_metadata)
        after, is_continued = self._position(previous_metadata)
        if current_metadata is not None:
            saved_for = current_metadata["after"], current_metadata["generation"]
            if saved_for == (after, self._source.generation):
                return current_metadata
        before = previous_metadata if is_continued else None
        with connected(self._conninfo, self._query) as connection:
            if self._survey is None:
                self._survey = self._survey_table(connection, after, before)
            survey = self._survey
            following = self._next_range(connection, after, survey, previous_metadata)
            if before is not None:
                self._check_late(connection, survey, before)
        if following is None and current_metadata is not None:
            entries = {name: value for name, value in (previous_metadata or {}).items() if name in _KEPT}
            return {"after": after, "to": after, "splits": [], "rows": 0, **entries, "generation": self._source.generation}
        return following

    def _position(self, previous: SourceMetadata | None) -> tuple[Position | None, bool]:
        """Return the start of the next range, and whether the table has to be the same as before."""
        if previous is None:
            return None, False
        before, now = previous.get("generation", 1), self._source.generation
        if not is_range(previous) and (before >= now or self._source.keeps_position):
            raise SourceChanged(
                f"{self._query.name}: the batches so far are from another kind of source, which says nothing of where this one "
                f"stands. To read it from its beginning, with the same states, declare generation={before + 1} in the "
                "PostgresTable, without keeps_position, and raise the pipeline's version."
            )
        if before > now:
            raise SourceChanged(
                f"{self._query.name}: rows of generation {before} were read already, so generation={now} cannot be read any "
                "more. Declare the newer one again."
            )
        if before == now:
            return previous["to"], True
        return (previous["to"] if self._source.keeps_position else None), False

    def _survey_table(self, connection: Any, after: Position | None, previous: SourceMetadata | None) -> "_Survey":
        """Check that the table is the same as before; find the settled rows.

        `previous` is the previous batch's metadata; None if there is none, or a new generation begins.
        """
        source, query = self._source, self._query
        with transaction(connection) as cursor:
            check_primary(cursor, query)
            origin = read_origin(cursor, query, SourceUnreadable)
            check_query(cursor, query, origin)
            timeline = read_timeline(cursor)
            if previous is not None:
                check_same_origin(query, previous.get("origin"), origin, source.generation)
                if not self._goes_on:
                    check_timeline(query, previous, timeline, source.generation)
                check_in_time(cursor, query, previous)
            check_keys(cursor, query, origin.types)
            highest = None if source.is_by_clock else highest_key(cursor, query, after)
            sequences, drawn = self._read_sequences(cursor, origin)
            if drawn is not None and previous is not None:
                check_sequence(query, drawn, previous, self._advice)
            if drawn is not None:
                check_drawn(cursor, query, origin.types, drawn, after, highest)
        if source.is_by_clock:
            margin = max(source.margin_seconds, origin.step_seconds)
            settled = settled_by_clock(connection, query, origin.read, after, source.wait_seconds, margin)
        else:
            settled = settled_by_sequence(connection, query, origin.read, highest, source.wait_seconds)
        snapshot = None
        if settled is not None:
            with transaction(connection) as cursor:  # after the wait: what it waited for is in the snapshot
                # Times of settled rows are compared with it at each plan: one that is early would take them for late.
                snapshot = snapshot_of(cursor, query, may_be_early=not source.is_by_clock)
        return _Survey(settled, snapshot, origin, timeline, sequences)

    def _read_sequences(self, cursor: Any, origin: Origin) -> tuple[list[Sequence], Sequence | None]:
        """Return the sequences that may draw the key, and the one that does; a time is not drawn."""
        if self._source.is_by_clock:
            return [], None
        sequences = read_sequences(cursor, self._query, origin, is_promised=self._source.key_is_drawn)
        return sequences, drawn_by(self._query, origin, sequences, is_promised=self._source.key_is_drawn)

    def _next_range(
        self, connection: Any, after: Position | None, survey: "_Survey", previous: SourceMetadata | None
    ) -> SourceMetadata | None:
        """Return the range of the next `max_rows` settled rows, and those that share the last key; None if there are none."""
        source = self._source
        if survey.snapshot is None:
            return None
        ends, partitions = self._ends(connection, after, survey)
        if not ends:
            return None
        rows, keys, gaps, *to = ends[-1]
        splits: list[Position] = []
        for _, _, _, *split in ends[:-1]:
            if split != to and split not in splits[-1:]:  # rows that share a key stay in one part
                splits.append(split)
        metadata = {"after": after, "to": to, "splits": splits, "rows": rows, "generation": source.generation}
        # The plan's first snapshot: rows that it does not show are late for all of its ranges.
        metadata |= {"snapshot": survey.snapshot, "attached": attached(partitions, survey.snapshot)}
        metadata |= {"origin": survey.origin.metadata(survey.timeline, survey.sequences)}
        if source.kind == "transactional":
            metadata["keys"] = keys
        if gaps is not None or (previous and "gaps" in previous):
            earlier = (previous or {}).get("gaps", []) if after is not None else []
            metadata["gaps"] = [*earlier, *(gaps or [])][-GAPS:]
        return metadata

    def _ends(self, connection: Any, after: Position | None, survey: "_Survey") -> tuple[list[Any], PartitionTables]:
        """Return the ends of the next range's parts, and the partitions that the table had all the while."""
        table = survey.origin.table if self._query.table else None
        while True:
            with transaction(connection) as cursor:
                partitions = partitions_of(cursor, table)
                cursor.execute(self._statement(after, survey))
                ends = cursor.fetchall()
                if partitions_of(cursor, table) == partitions:
                    return ends, partitions

    def _check_late(self, connection: Any, survey: "_Survey", previous: SourceMetadata) -> None:
        """Refuse rows that came too late for the previous ranges.

        This is checked once the next range is chosen: later rows are not in the snapshot, so the next plan finds them.
        """
        source, query = self._source, self._query
        is_strict = source.kind == "transactional"
        with transaction(connection) as cursor:
            origin = read_origin(cursor, query, SourceUnreadable)  # again: the table may have been rewritten since
            if origin.table is not None and query.table:
                check_attached(cursor, query, origin.table, previous, self._advice)
            if survey.is_checked:
                return
            _, drawn = self._read_sequences(cursor, origin)
            if drawn is not None:
                check_altered(cursor, query, origin, drawn, previous, self._advice)
            if is_strict:
                check_gaps(cursor, query, previous)
                check_newest_range(cursor, query, previous)
            elif source.is_by_clock:
                check_times(cursor, query, origin, previous, source.max_rows)
        survey.is_checked = True

    @property
    def _advice(self) -> str:
        return START_AGAIN.format(generation=self._source.generation + 1)

    def _statement(self, after: Position | None, survey: "_Survey") -> sql.Composed:
        """Return the query for the last key of each part of the next range; it uses the key's index."""
        source, query = self._source, self._query
        assert survey.settled is not None
        digest = sql.SQL("(SELECT {} FROM tidegate_batch)").format(query.digest)
        return sql.SQL(
            "WITH tidegate_batch AS MATERIALIZED ("
            " SELECT {keys} FROM {relation} WHERE {beyond} AND {settled} ORDER BY {keys} FETCH FIRST {rows} ROWS WITH TIES"
            "), tidegate_numbered AS ("
            " SELECT {keys}, row_number() OVER (ORDER BY {keys}) AS tidegate_n, count(*) OVER () AS tidegate_total"
            " FROM tidegate_batch"
            ") SELECT tidegate_n, {digest}, {gaps}, {position}"
            " FROM tidegate_numbered WHERE tidegate_n % {step} = 0 OR tidegate_n = tidegate_total ORDER BY tidegate_n"
        ).format(
            position=query.position,
            keys=query.keys,
            relation=query.relation,
            beyond=query.beyond(after),
            settled=survey.settled,
            digest=digest if source.kind == "transactional" else sql.SQL("NULL"),
            gaps=sql.SQL("NULL") if source.is_by_clock else gaps_of(query, survey.origin.types, after),
            rows=sql.Literal(source.max_rows),
            step=sql.Literal(ceil(source.max_rows / source.partitions)),
        )


@dataclass
class _Survey:
    """The findings of one plan: the settled rows' condition and a snapshot, None if there are none; where these are from."""

    settled: sql.Composable | None
    snapshot: str | None
    origin: Origin
    timeline: str
    sequences: list[Sequence]
    is_checked: bool = False
