"""Planning decides which batches a run covers, and what each new batch reads."""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tidegate.jobs.engine.acks import give_overdue_acks
from tidegate.jobs.engine.listeners import harmless
from tidegate.jobs.engine.txid_ranges import MAX_BATCHES_PER_RUN, check_range
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.registry import find_pipeline, has_pipeline, pipeline_names, unknown
from tidegate.jobs.sources import Coordinator
from tidegate.jobs.sources.binding import coordinator_of, replayed_with
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import PipelinePaused, PipelineRetired, SourceUnavailable, describe
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.ledger.batches import QUARANTINED, BatchInput, encode_metadata, position_of
from tidegate.state_store.ledger.counted_files import TakenFile
from tidegate.state_store.ledger.plan_outcomes import Beginning
from tidegate.state_store.turns.begin_attempt import ReplanNeeded

logger = logging.getLogger(__name__)


def plan_batches(
    store: StateStore,
    declared: Pipeline | str,
    *,
    run_id: str,
    from_txid: int | None = None,
    to_txid: int | None = None,
    max_batches: int | None = None,
) -> list[int]:
    """Return the txids that a run covers, in order; freeze the metadata of new batches. [] means nothing to do.

    Without a range: all uncommitted batches, then the source's new ones. With a range: the uncommitted txids in it; batches up
    to `to_txid` are opened if the source has them. Both up to `max_batches`. The same `run_id` always gets the same
    txids, so a repeated plan opens no batch. If another run opens batches meanwhile, planning starts over after those.
    First, the source gets the acks that earlier runs owe it; at the end, some old staging is dropped.

    A failed plan stays in the ledger until another succeeds, unless the process dies before recording it. Refusals of the
    name, the range, or a paused or retired pipeline are not recorded.

    Raises: RangeRefused if the range is reversed or would leave a gap; PipelinePaused, PipelineRetired; HoleDetected,
    SchemaOutOfDate; DeclarationChanged if there are new batches, and the declaration is not the registered one; the source's
    errors; those of `find_pipeline`.
    """
    name = declared if isinstance(declared, str) else declared.name
    if isinstance(declared, str) and not has_pipeline(declared):
        raise unknown(declared, pipeline_names())
    began = store.begin_plan(name, run_id)
    check_range(name, began.committed, from_txid, to_txid, max_batches)
    with _failure_recorded(store, name, began, run_id):
        pipeline = find_pipeline(declared)
        give_overdue_acks(store, pipeline)
        limit = min(max_batches or MAX_BATCHES_PER_RUN, MAX_BATCHES_PER_RUN)
        while (txids := _plan_once(store, pipeline, run_id, from_txid, to_txid, limit)) is None:
            logger.info("%s: another run planned at the same moment; planning again", name)
        if dropped := store.drop_old_staging(pipeline.spec):
            logger.info("%s: dropped the staging of %d old attempts", name, dropped)
        return txids


@contextmanager
def _failure_recorded(store: StateStore, pipeline: str, began: Beginning, run_id: str) -> Iterator[None]:
    """Record an error of the block, such as Airflow's timeout, as a failed plan, then raise it.

    A pause or retirement of the pipeline, or an interrupt of this process, is no failure.
    """
    try:
        yield
    except (PipelinePaused, PipelineRetired, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        with harmless(pipeline, "the failure of its plan is not recorded in the ledger."):
            store.fail_plan(pipeline, began, run_id, describe(error))
        raise


def replan(store: StateStore, pipeline: Pipeline, txid: int, needed: ReplanNeeded) -> SourceMetadata:
    """Return new metadata for an opaque source's batch, planned again after its predecessor.

    Raises: SourceUnavailable, and the source's errors.
    """
    before = position_of(needed.previous)
    if QUARANTINED in needed.current:  # the batch keeps its records; the source's position, and references, may have moved
        return {**needed.current, "source": before, **replayed_with(pipeline.source, store.settings)}
    coordinator = coordinator_of(pipeline.source, store.settings)
    coordinator.look_back(LedgerHistory(store, pipeline.name))
    metadata = coordinator.initialize_transaction(txid, before, needed.current)
    if metadata is None:
        raise SourceUnavailable(f"{pipeline.name} {txid}: the source has nothing in place of what it planned before.")
    return metadata


@dataclass(frozen=True)
class LedgerHistory:
    """The ledger's record of earlier batches, for one pipeline's coordinator: implements `tidegate.jobs.sources.History`."""

    store: StateStore
    pipeline: str

    def committed(self) -> int:
        """Return the last committed txid."""
        return self.store.committed(self.pipeline)

    def taken_files(self, names: Sequence[str], before_txid: int) -> Iterator[tuple[str, Sequence[TakenFile]]]:
        """Yield each name with the files of that name in batches before a txid."""
        return self.store.taken_files(self.pipeline, names, before_txid)

    def files_of_times(self, times: Collection[int], inodes: Collection[str], before_txid: int) -> Sequence[TakenFile]:
        """Return the files with these modification times in batches before a txid."""
        return self.store.files_of_times(self.pipeline, times, inodes, before_txid)

    def note_times(self, files: Sequence[TakenFile]) -> None:
        """Record the new modification times of files that have counted."""
        self.store.note_times(self.pipeline, files)


def next_batch(store: StateStore, pipeline: Pipeline) -> SourceMetadata | None:
    """Return the metadata that a plan would give the next new batch; None if nothing is new. Opens no batch.

    Raises: the source's errors, as a plan does.
    """
    after = store.last_opened(pipeline.name)
    txid, position = (after.txid + 1, position_of(after.metadata)) if after else (1, None)
    if pipeline.rebuilds is not None:
        return next(iter(store.batches_to_rebuild(pipeline.spec, txid - 1, 1)), None)
    coordinator = _coordinator(store, pipeline)
    return coordinator.initialize_transaction(txid, position, None) if coordinator.is_ready(txid) else None


def _coordinator(store: StateStore, pipeline: Pipeline) -> Coordinator:
    coordinator = coordinator_of(pipeline.source, store.settings)
    coordinator.look_back(LedgerHistory(store, pipeline.name))
    coordinator.success(store.committed(pipeline.name))
    return coordinator


def _plan_once(
    store: StateStore, pipeline: Pipeline, run_id: str, from_txid: int | None, to_txid: int | None, limit: int
) -> list[int] | None:
    """Plan after the last batch in the ledger; return None if another run has opened batches since this one looked."""
    if planned := store.run_txids(pipeline.name, run_id):
        return planned
    newest = store.last_opened(pipeline.name)
    last = newest.txid if newest else 0
    last_requested = last + limit if to_txid is None else to_txid
    pending = [txid for txid in store.uncommitted(pipeline.name, limit) if (from_txid or 1) <= txid <= last_requested]
    most = min(last_requested - last, limit - len(pending))
    new = _new_batches(store, pipeline, newest, most) if most > 0 else None  # None: the source was not asked
    return store.open_batches(pipeline.spec, run_id, pending, newest, new, awaits_ack=pipeline.wants_acks)


def _new_batches(store: StateStore, pipeline: Pipeline, newest: BatchInput | None, most: int) -> list[bytes]:
    """Return the metadata of the batches that the source has after the newest one, at most so many."""
    last, position = (newest.txid, position_of(newest.metadata)) if newest else (0, None)
    if pipeline.rebuilds is not None:
        return [encode_metadata(metadata) for metadata in store.batches_to_rebuild(pipeline.spec, last, most)]
    coordinator = _coordinator(store, pipeline)
    found: list[bytes] = []
    for txid in range(last + 1, last + most + 1):
        if not coordinator.is_ready(txid):
            break
        position = coordinator.initialize_transaction(txid, position, None)
        if position is None:
            break
        found.append(encode_metadata(position))
    return found
