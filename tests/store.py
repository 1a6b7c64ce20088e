"""The parts of the store that tests reach beside its public face: whoever changes how they are divided changes this file.

Tests import them from here, and `Settings`, `StateStore` and the errors from `tidegate.state_store`.
"""

from tidegate.state_store.attempt import attempts, heartbeats
from tidegate.state_store.attempt.attempts import Attempt, StagedPartition, Tracked
from tidegate.state_store.attempt.staging_tables import digest_statement
from tidegate.state_store.base import errors, project
from tidegate.state_store.base.project import HOME_VARIABLE, STACK_FOLDER
from tidegate.state_store.commit import (
    combine_batches,
    commit_facts,
    event_windows,
    merge_expressions,
    merge_into_states,
    verdicts,
)
from tidegate.state_store.commit.author_updates import UpdateBatch
from tidegate.state_store.commit.commit_record import Commit
from tidegate.state_store.commit.ordered_commit import MAX_BATCHES_TOGETHER
from tidegate.state_store.connections import lock_holders, role_settings
from tidegate.state_store.connections.answer_deadlines import NoAnswer
from tidegate.state_store.connections.copy_into_staging import copy_partition, copy_rows
from tidegate.state_store.connections.database import set_limits
from tidegate.state_store.connections.executor_connections import connect
from tidegate.state_store.declarations.column_spec import ColumnType, KeyColumn, ValueColumn
from tidegate.state_store.declarations.pipeline_spec import (
    WINDOW,
    PipelineSpec,
    QuarantineSpec,
    SourceKind,
    SourceMetadata,
    Staged,
    StateKind,
    StateRead,
    StateSpec,
    exactly_once,
    spec_of,
)
from tidegate.state_store.declarations.window_spec import WindowSpec
from tidegate.state_store.ledger import commit_witness, cursors, schema_revision, tables
from tidegate.state_store.ledger.batches import (
    MAX_METADATA_BYTES,
    MAX_TXID,
    QUARANTINED,
    BatchInput,
    encode_metadata,
    position_of,
)
from tidegate.state_store.ledger.commit_witness import Mark, Witness
from tidegate.state_store.operate import pruning
from tidegate.state_store.operate.mended_records import MAX_BYTES, Mend
from tidegate.state_store.operate.pruning import Pruned, PrunedRanges, Removal
from tidegate.state_store.operate.recorded_actions import Redo
from tidegate.state_store.pipeline_changes import declaration_changes, rebuilds, registration, retirement, table_swap
from tidegate.state_store.pipeline_changes.retirement import Request
from tidegate.state_store.read_ledger import batch_search
from tidegate.state_store.read_ledger.batch_phases import PHASES
from tidegate.state_store.read_ledger.batch_search import BatchFilter
from tidegate.state_store.read_ledger.batch_status import BatchHistory
from tidegate.state_store.read_ledger.ledger_reader import LedgerReader
from tidegate.state_store.read_ledger.metric_values import measures
from tidegate.state_store.read_states import executor_lookup, state_rows
from tidegate.state_store.read_states.named_query_answers import ask
from tidegate.state_store.read_states.state_rows import StateReader, version_of
from tidegate.state_store.read_states.transform_reads import QueriedState
from tidegate.state_store.states import key_lookup, partitions, range_partitions, state_tables
from tidegate.state_store.states.key_lookup import get
from tidegate.state_store.states.state_tables import state_table_of
from tidegate.state_store.store import STAGING_DROPS_PER_PLAN
from tidegate.state_store.turns import batch_turns, begin_attempt
from tidegate.state_store.turns.batch_turns import Turn
from tidegate.state_store.turns.begin_attempt import Mode, NewInput, NotStarted, ReplanNeeded
