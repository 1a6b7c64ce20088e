"""Batches without rows, which tests move through the real ledger without Spark."""

from tests.store import AirflowTry, Attempt, Commit, Tracked, encode_metadata
from tidegate.jobs import Pipeline
from tidegate.state_store import StateStore


class Batches:
    """Moves batches of one pipeline through the ledger."""

    def __init__(self, store: StateStore, pipeline: Pipeline) -> None:
        self.store = store
        self.spec = pipeline.spec
        self.name = pipeline.name

    def plan(self, run_id: str, count: int, *, awaits_ack: bool = False) -> list[int]:
        """Open `count` batches and give them to a run."""
        after = self.store.last_opened(self.name)
        metadata = [encode_metadata({"files": [], "number": number}) for number in range(count)]
        opened = self.store.open_batches(self.spec, run_id, [], after, metadata, awaits_ack=awaits_ack)
        assert opened is not None
        return opened

    def begin(self, txid: int, airflow: AirflowTry | None = None) -> Attempt:
        """Start an attempt."""
        attempt = self.store.start_attempt(self.spec, txid, "a test", airflow=airflow)
        assert isinstance(attempt, Attempt)
        return attempt

    def seal(self, txid: int, rows: int = 0, airflow: AirflowTry | None = None) -> None:
        """Process a batch."""
        self.store.seal(self.begin(txid, airflow), [], Tracked(rows))

    def fail(self, txid: int, error: str = "MALFORMED_RECORD: a.csv, line 3.") -> None:
        """Let a batch fail by its content, and halt it, as its task does after the last try."""
        self.store.fail_attempt(self.begin(txid), error, is_poison=True)
        self.store.halt_batch(self.name, txid, error)

    def give_up(self, txid: int) -> None:
        """Fail a batch permanently: its pipeline's policy gives it up."""
        self.store.fail_attempt(self.begin(txid), "MALFORMED_RECORD: a.csv, line 3.", is_poison=True)
        self.store.give_up(self.name, txid, "the pipeline's policy", "6 tries failed")

    def commit(self, txid: int) -> Commit:
        """Commit a batch that was processed or given up."""
        return self.store.commit_batch(self.spec, txid, "a test")
