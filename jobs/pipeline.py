"""Pipeline: an author's declaration, checked on construction: source, states, tries, timeout, policy, concurrency, version."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from tidegate.jobs import state_queries
from tidegate.jobs.checks import Check, check_declared
from tidegate.jobs.impure_sql import OF_TIMES, impure_in_sql
from tidegate.jobs.sources import Source
from tidegate.jobs.state_queries import StateQuery
from tidegate.jobs.states import AnyState
from tidegate.state_store.declarations.pipeline_spec import WINDOW, PipelineSpec, exactly_once, rebuilt_by, rebuilt_name

# A DataFrame in, or several by name, and a DataFrame out; Any keeps pyspark out of this module.
Transform = Callable[[Any], Any]
Guarantee = Literal["exactly_once", "at_least_once"]
Tracking = Literal["full", "off"]
PoisonPolicy = Literal["block", "quarantine", "skip"]
LONGEST_RETRY_PAUSE_SECONDS = 120


@dataclass(frozen=True)
class Retry:
    """How often a failed step of a batch is tried in one run, and the pauses between; for Airflow's tasks and local runs."""

    tries: int = 6
    delay_seconds: int = 5

    def pause_after(self, failures: int) -> int | None:
        """Return the seconds until the next try, twice as many after each failure; None if no try is left."""
        if failures >= self.tries:
            return None
        pause: int = self.delay_seconds * 2 ** (failures - 1)
        return min(pause, LONGEST_RETRY_PAUSE_SECONDS)


@dataclass(frozen=True)
class Pipeline:
    """A source, a transform, and the states that its rows become.

    `transform` takes and returns a DataFrame; over `Inputs`, it takes a mapping of their names to DataFrames. It must be a
    function of its rows alone, and of the states that it reads (see `queries`): the same in, the same rows out, whenever and
    however often it runs. It sees no txid, no attempt and no connection. It stays on its DataFrames (`selectExpr`, `where`,
    `join`, `groupBy` ...): batches share a Spark session, so a view could show one the rows of another.

    `concurrency` is how many batches are processed at once, `window` how many may be in flight, that is begun and not
    committed: it bounds the staging of batches that wait for a stuck one. The three designs of transactional topologies are
    batches of one record and a window of 1, larger batches and a window of 1, larger batches and a larger window.

    Raise `version` when the transform's meaning or the source changes: attempts that an older version computed then never
    count, and batches that have committed stay as they are.

    `guarantee`: source and states must be of kinds that give exactly-once, unless this says "at_least_once".

    `check` names conditions, in Spark SQL over the source's columns, that must be true, and not NULL, for every record. Like a
    transform, they depend on the record alone, and not on the clock. Of several inputs, it may have conditions for each:
    ``check={"flights": {"has a tail": "tailnum IS NOT NULL"}}``.

    `checks` are conditions on a whole batch and on the states as they would be, evaluated in its commit: each blocks the batch,
    warns, or sets rows aside (`tidegate.jobs.checks.Check`).

    `queries` names the committed states that the transform reads with `state_query`, and as of when. If it reads the pipeline's
    own, as the batch before has left them, the window is 1 (`tidegate.jobs.state_queries.StateQuery`).

    `on_poison` decides about a batch whose content is bad (``docs/poison.md`` has the whole table):

        block       it waits for a person; later txids are processed as far as the window goes
        quarantine  records that cannot be read, or fail a check, are set aside in ``tidegate.quarantine`` in the commit of
                    their batch, and the others count; a batch that fails otherwise blocks
        skip        after `tries` tries a commit without its rows takes its place, with the reason, and the order goes on

    Only content can be bad. Under every policy, the engine waits for a server that is away, tries a failed computation `tries`
    times in a run, with growing pauses from `retry_delay_seconds` on, and leaves a source that changed to a person.

    `message_timeout_seconds` ends an attempt that takes longer, and it is tried again; by default, the setting
    `attempt_timeout_seconds` does. `tracking="off"` turns off the sums of row hashes: a replay is then not compared with the
    first attempt, and lost rows go unnoticed.
    """

    name: str
    source: Source
    states: Mapping[str, AnyState]
    transform: Transform | None = None
    concurrency: int = 4
    window: int = WINDOW
    version: int = 1
    description: str = field(default="", compare=False)
    guarantee: Guarantee = "exactly_once"
    check: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    checks: Mapping[str, Check] = field(default_factory=dict)
    queries: Sequence[StateQuery] = ()
    on_poison: PoisonPolicy = "block"
    tries: int = Retry.tries
    retry_delay_seconds: int = Retry.delay_seconds
    message_timeout_seconds: int | None = None
    tracking: Tracking = "full"
    # Not for authors: `rebuild` sets it.
    rebuilds: str | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("a concurrency", self.concurrency, 1),
            ("a window", self.window, 1),
            ("a version", self.version, 1),
            ("tries", self.tries, 1),
            ("a retry_delay_seconds", self.retry_delay_seconds, 0),
            ("a message_timeout_seconds", self.message_timeout_seconds, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"Pipeline {self.name} has {name} of {value}; it must be at least {least}.")
        for name, choice, choices in (
            ("guarantee", self.guarantee, Guarantee),
            ("on_poison", self.on_poison, PoisonPolicy),
            ("tracking", self.tracking, Tracking),
        ):
            if choice not in get_args(choices):
                raise ValueError(f"Pipeline {self.name} has {name}={choice!r}; use one of {', '.join(get_args(choices))}.")
        self._check_name()
        self._check_conditions()
        self.source.check_pipeline(
            self.name, has_transform=self.transform is not None, quarantines=self.on_poison == "quarantine", check=self.check
        )
        if self.queries and self.transform is None:
            raise ValueError(f"Pipeline {self.name} has queries, and no transform that could ask them.")
        state_queries.check(self.spec, self.queries, is_exactly_once=self.guarantee == "exactly_once")
        if self.spec.awaits_previous and self.window not in (1, WINDOW):
            raise ValueError(
                f"Pipeline {self.name} has a window of {self.window}, and its batches read what the one before has left: leave "
                "it out, as the window is 1 then."
            )
        check_declared(self.name, self.checks, self.spec)
        if self.guarantee == "exactly_once" and not self.is_exactly_once:
            raise ValueError(self._why_not_exactly_once())

    def _check_name(self) -> None:
        if self.rebuilds is None and rebuilt_by(self.spec.declaration):
            raise ValueError(
                f"Pipeline {self.name} has a name that ends like those of all its states, as only a rebuild's does (tidegate "
                "rebuild). Give it another one."
            )

    def _check_conditions(self) -> None:
        for name, what in self.check.items():
            if not isinstance(what, str) and name not in self.source.input_names:
                raise ValueError(f"Pipeline {self.name} has checks for input {name!r}, which its source does not have.")
        columns = [column for part in self.source.parts.values() for column in getattr(part, "schema", {}).items()]
        times = {"", *(name.lower() for name, kind in columns if OF_TIMES.match(kind))}
        for name, condition in self.conditions.items():
            if found := sorted({each.name for each in impure_in_sql(condition) if each.beside in times}):
                raise ValueError(
                    f"Pipeline {self.name}: the check {name!r} uses {', '.join(found)}: what that gives depends on when and "
                    "where it runs, or on other records, so a batch that is tried again would set other records aside. Compare "
                    "columns of the record, such as a time of its own; write one of such a name in backquotes."
                )

    @cached_property
    def spec(self) -> PipelineSpec:
        """Return the store's view of this pipeline."""
        states = tuple(state.spec(name) for name, state in self.states.items())
        quarantines = self.on_poison == "quarantine"
        source = self.source
        reads_itself = any(query.is_repeatable for query in self.queries)
        return PipelineSpec(
            self.name,
            source.kind,
            source.identity,
            states,
            self.version,
            quarantines,
            keeps_files=source.keeps_files,
            window=1 if reads_itself else self.window,
            checks=tuple(self.checks.items()),
            queries=tuple(query.read for query in self.queries),
            rebuilds=self.rebuilds,
            known_columns=source.known_columns,
        )

    def rebuild(self) -> "Pipeline":
        """Return the pipeline that computes this one's committed batches again, into states of other names.

        Raises: ValueError if a name is too long to be followed by the version.
        """
        states = {rebuilt_name(name, self.version): state for name, state in self.states.items()}
        return replace(self, name=rebuilt_name(self.name, self.version), states=states, rebuilds=self.name)

    @property
    def retry(self) -> Retry:
        """Return how often a failed step of a batch is tried."""
        return Retry(self.tries, self.retry_delay_seconds)

    @property
    def wants_acks(self) -> bool:
        """Return whether the source has to learn of each commit; a rebuild's has learned of them already."""
        return self.rebuilds is None and self.source.wants_acks

    def check_of(self, name: str) -> dict[str, str]:
        """Return the conditions for the records of an input, by name; a single source has the one input ""."""
        of_input = self.check.get(name, {})
        for_all = {label: condition for label, condition in self.check.items() if isinstance(condition, str)}
        return for_all if isinstance(of_input, str) else {**for_all, **of_input}

    @property
    def conditions(self) -> dict[str, str]:
        """Return all conditions for single records by name, those of one input after its name: ``flights: has a tail``."""
        found: dict[str, str] = {}
        for name, what in self.check.items():
            found |= {name: what} if isinstance(what, str) else {f"{name}: {label}": each for label, each in what.items()}
        return found

    @property
    def is_exactly_once(self) -> bool:
        """Return whether the kinds of source and states give exactly-once, whatever `guarantee` says."""
        return all(exactly_once(self.source.kind, state.kind) for state in self.states.values())

    @property
    def lost_tracking(self) -> list[str]:
        """Return the losses that go unnoticed because tracking is reduced, a sentence each."""
        if self.tracking == "off":
            return ["lost rows and changed replays go unnoticed: tracking is off"]
        return [
            f"rows lost on the way into {name} go unnoticed: it is unanchored"
            for name, state in self.states.items()
            if state.unanchored
        ]

    def _why_not_exactly_once(self) -> str:
        kind, state = self.source.kind, next(n for n, s in self.states.items() if not exactly_once(self.source.kind, s.kind))
        way_out = {
            "transactional": f"Declare state {state} transactional or opaque",
            "opaque": f"Declare state {state} opaque",
            "non-transactional": "Use a source that can replay",
        }[kind]
        return (
            f"Pipeline {self.name}: {'an' if kind == 'opaque' else 'a'} {kind} source and the {self.states[state].kind} state "
            f"{state} do not give exactly-once. "
            f'{way_out}, or say guarantee="at_least_once".'
        )
