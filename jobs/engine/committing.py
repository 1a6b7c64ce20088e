"""Committing: which task commits, and with which batches.

    committer  the task that seals the batch after the cursor; if it died, any task that waits for its own batch's commit
    together   all sealed batches after the cursor in one transaction, up to limits of number and size (`ordered_commit`)
    alone      a batch of an opaque state, one that was given up, and every batch after a joint commit has failed
    timing     at once; but a sealed batch waits a little for others that could be merged with it (`turns`)
    busy       while another task holds the cursor's lock, a task that processed leaves the commit to it; a batch's own commit
               task waits for the lock
    errors     a failed joint commit changes nothing and blames no batch; each batch's own commit finds and reports its error

The cursor is the row with the last committed txid. A batch's turn opens when its predecessor has committed and its own
processing is over. Order and exactly-once do not depend on these rules: each commit checks them under the cursor's lock.
"""

import logging
from collections.abc import Callable, Collection, Sequence

from tidegate.jobs.engine.acks import ack
from tidegate.jobs.engine.listeners import Listener
from tidegate.jobs.engine.log_fields import about
from tidegate.jobs.engine.processing import halting
from tidegate.jobs.pipeline import Pipeline
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import TidegateError, Unprocessed
from tidegate.state_store.commit.commit_record import Commit
from tidegate.state_store.operate.recorded_actions import Redo

logger = logging.getLogger(__name__)


class Committer:
    """Commits batches of one pipeline on behalf of one owner."""

    def __init__(self, store: StateStore, pipeline: Pipeline, owner: str, listeners: Sequence[Listener]) -> None:
        self._store = store
        self._pipeline = pipeline
        self._owner = owner
        self._listeners = listeners

    def commit(self, txid: int, restage: Callable[[int], object]) -> Commit:
        """Commit a batch, together with the sealed batches next to it; return the commit, also if it had committed before.

        `restage` processes a batch again that has no staging that may be committed. After the commit, the source gets the ack.

        Raises: CommitOutOfOrder, AttemptNotSealed, Unprocessed, StoreUnavailable (retryable); permanent errors.
        """
        store, pipeline = self._store, self._pipeline
        with halting(store, pipeline.name, txid):
            own, together = self._commit_own(txid, restage)
            ack_was_tried = txid in together or (own.already_committed and store.turn(pipeline.name, txid).done)
            if not ack_was_tried:
                ack(store, pipeline, own)
            if not own.already_committed:
                self._commit_following(max(together, default=txid) + 1)
            return own

    def _commit_own(self, txid: int, restage: Callable[[int], object]) -> tuple[Commit, Collection[int]]:
        """Commit a batch, processed again if need be; return the commit, and the txids that were committed together, if any."""
        try:
            return self._commit_with_next(txid)
        except Unprocessed as why:
            with about(self._pipeline.name, txid):
                logger.warning("%s", why)
        restage(txid)
        return self._commit_with_next(txid)

    def _commit_with_next(self, txid: int) -> tuple[Commit, Collection[int]]:
        together = {commit.txid: commit for commit in self._try_together()}
        return together.get(txid) or self._commit_alone(txid), together.keys()

    def commit_ready(self) -> None:
        """Commit the sealed batches after the cursor, unless another task is committing.

        If another task commits the first of them meanwhile, their turns still count as open, and the commit begins at the first
        uncommitted batch.
        """
        following = self._store.committed(self._pipeline.name) + 1
        while self._opens(following) and (commits := self._try_together(wait=False)):
            following = commits[-1].txid + 1

    def redo(self, txid: int, reason: str, without: Collection[str]) -> Commit:
        """Replace the last committed batch's effect on the states by its newest attempt's; then give the source the ack.

        The store must be connected as the owner of the tables. If the process dies before the ack, the next plan gives it.

        Raises: RangeRefused, UsageError, Unprocessed, and the errors of `commit`.
        """
        pipeline = self._pipeline
        request = Redo(self._owner, reason, pipeline.wants_acks, without)
        commit = self._store.redo_batch(pipeline.spec, txid, request)
        ack(self._store, pipeline, commit)
        return commit

    def _commit_following(self, txid: int) -> None:
        """Commit this batch and those that directly follow, while their turns are open.

        An error ends the loop: the batch's own task meets the error again, and reports it.
        """
        may_join = True
        while self._opens(txid):
            try:
                commits = self._try_together() if may_join else []
                may_join = bool(commits)  # a failed joint commit would fail again: from here on, each batch commits alone
                commits = commits or [self._commit_alone(txid)]
            except TidegateError as stop:
                with about(self._pipeline.name, txid):
                    logger.info("%s %s is left to its own task: %s", self._pipeline.name, txid, stop)
                return
            if commits[-1].already_committed:
                return
            txid = commits[-1].txid + 1

    def _opens(self, txid: int) -> bool:
        turn = self._store.turn(self._pipeline.name, txid)
        return turn.opens and not turn.halted

    def _commit_alone(self, txid: int) -> Commit:
        timeout = self._pipeline.message_timeout_seconds
        commit = self._store.commit_batch(self._pipeline.spec, txid, self._owner, attempt_timeout_seconds=timeout)
        if not commit.already_committed:
            self._notify([commit])
        return commit

    def _try_together(self, *, wait: bool = True) -> list[Commit]:
        """Commit the sealed batches after the cursor in one transaction; [] if another task commits, or on any error.

        Every error is caught, because each batch's own commit then shows whether it was at fault.
        """
        try:
            return self._commit_together(wait=wait)
        except Exception as error:  # noqa: BLE001 - each batch's own commit reports it
            self._log_why_not_together(error)
            return []

    def _commit_together(self, *, wait: bool) -> list[Commit]:
        done = self._store.commit_ready(self._pipeline.spec, self._owner, wait=wait)
        for commit in done:
            with about(commit.pipeline, commit.txid, commit.attempt):
                logger.info("%s", commit)
                ack(self._store, self._pipeline, commit)
        if done:
            self._notify(done)
        return done

    def _notify(self, commits: Sequence[Commit]) -> None:
        for listener in self._listeners:
            listener.on_committed(self._store, self._pipeline.name, [commit.txid for commit in commits])

    def _log_why_not_together(self, error: Exception) -> None:
        unexpected = None if isinstance(error, TidegateError) else error
        level = logging.WARNING if unexpected else logging.INFO
        name = self._pipeline.name
        logger.log(level, "%s: the next batches are not committed together: %s", name, error, exc_info=unexpected)
