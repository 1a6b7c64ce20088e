"""The status of stack and pipelines, of one moment: as tables, as lines, and as JSON."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidegate import output
from tidegate.explain.batch_causes import quoted
from tidegate.state_store.base.errors import TidegateError
from tidegate.state_store.base.settings import Settings

if TYPE_CHECKING:
    from tidegate.stack import ComponentStatus
    from tidegate.state_store.pipeline_changes.retirement import RetiredPipeline
    from tidegate.state_store.read_ledger.batch_status import Lag

STATES = {"up": "up", "starting": "...", "stopped": "stopped", "gave up": "failed"}
PAGE_PATH = "/tidegate/"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Look:
    """What one look at the status has found; `trouble` is why the ledger could not be asked.

    `losses` says of which pipelines this database lacks commits, or may, so that they are halted.
    """

    lags: "list[Lag]" = field(default_factory=list)
    retired: "list[RetiredPipeline]" = field(default_factory=list)
    losses: dict[str, str] = field(default_factory=dict)
    components: "list[ComponentStatus]" = field(default_factory=list)
    advice: str | None = None
    page: str | None = None
    trouble: TidegateError | None = None

    def facts(self) -> dict[str, Any]:
        """Return what is found for programs."""
        return {
            "pipelines": [asdict(lag) for lag in self.lags],
            "retired": [each._asdict() for each in self.retired],
            "losses": self.losses,
            "components": [asdict(component) for component in self.components],
            "advice": self.advice,
            "page": self.page,
        }

    def lines(self) -> dict[str, str]:
        """Return a line per pipeline and component, by its name; they change only with what they tell."""
        found = {f"component {c.name}": f"{c.name}: {_state(c)}" for c in self.components}
        for lag in self.lags:
            parts = [f"committed {lag.committed} of {lag.opened}"]
            parts += [f"{lag.quarantined} in quarantine"] if lag.quarantined else []
            parts += [f"{len(lag.new_columns)} new columns not declared"] if lag.new_columns else []
            waits = waits_for(lag, self.losses)
            found[f"pipeline {lag.pipeline}"] = f"{lag.pipeline}: {', '.join(parts)}{f'; waits for {waits}' if waits else ''}"
        if self.advice:
            found["advice"] = self.advice
        if self.trouble:
            found["trouble"] = str(self.trouble)
        return found


class Background(Generic[_T]):
    """A function that runs in a thread which does not hold up the end of the process."""

    def __init__(self, function: Callable[[], _T]) -> None:
        self._result: _T | None = None
        self._error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - it is raised again where the result is needed
            self._error = error

    def is_done(self, seconds: float) -> bool:
        """Wait at most so long; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> _T:
        """Wait for the end and return the result, or raise the error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


def look(settings: Settings) -> Look:
    """Ask the stack and the ledger at the same time."""
    from tidegate import stack  # noqa: PLC0415 - verbs that do not need it start faster

    request = Background(lambda: stack.status(settings))  # Airflow takes as long to answer as SQLAlchemy to load
    from tidegate.state_store import StateStore  # noqa: PLC0415

    lags, retired, losses, trouble = [], [], {}, None
    try:
        with StateStore.connect(settings) as store:
            lags, retired, losses = store.lag(), store.retired_pipelines(), store.losses()
    except TidegateError as error:
        trouble = error
    components = request.result()
    has_page = any(component.name == "airflow-api-server" and component.state == "up" for component in components)
    page = page_address(settings) if has_page else None
    return Look(lags, retired, losses, components, stack.advice(settings), page, trouble)


def page_address(settings: Settings) -> str:
    """Return the address of the operator's page."""
    return settings.airflow_url.rstrip("/") + PAGE_PATH


def pipelines_table(lags: "list[Lag]", losses: Mapping[str, str]) -> tuple[str, list[str], list[list[Any]]]:
    """Return title, columns and rows."""
    names = ["pipeline", "committed", "opened", "pending", "quarantined"]
    columns = [*names, "lag", "rows/s", "committed_at", "waits_for"]
    rows = [
        [
            *(getattr(lag, name) for name in names),
            None if lag.lag_seconds is None else duration(lag.lag_seconds),
            None if lag.rows_per_second is None else round(lag.rows_per_second),
            lag.committed_at,
            waits_for(lag, losses),
        ]
        for lag in lags
    ]
    return "Pipelines", columns, rows


def components_table(components: "list[ComponentStatus]") -> tuple[str, list[str], list[list[Any]]]:
    """Return title, columns and rows."""
    columns = ["component", "state", "address", "pid", "restarts", "log"]
    return "Stack", columns, [[c.name, _state(c), c.address, c.pid, c.restarts, c.log] for c in components]


def show(found: Look, notes: list[str]) -> None:
    """Print tables of the pipelines, unless the ledger could not be asked, and of the stack."""
    if found.trouble is None:
        output.print_table(*pipelines_table(found.lags, found.losses))
        output.out().print()
        for loss in found.losses.values():
            output.say(f"{loss} It is halted until a person decides: tidegate error HOLE_DETECTED")
        if found.retired:
            names = [each.pipeline for each in found.retired]
            output.say(f"Retired: {', '.join(names)}. When and why: tidegate why {names[0]}")
        from tidegate.state_store.ledger import undeclared_columns  # noqa: PLC0415 - loads SQLAlchemy, as `look` did

        for lag in (lag for lag in found.lags if lag.new_columns):
            output.say(f"{lag.pipeline}: {undeclared_columns.sentence(lag.new_columns)} See: tidegate why {lag.pipeline}")
        for note in notes:
            output.say(note)
    if found.components:
        output.print_table(*components_table(found.components))
    else:
        output.say("No embedded stack was started here.")
    if found.page:
        output.say(f"The operator's page: {found.page}")


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: 12 s, 3 min 04 s, 2 h 05 min, 3 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _state(component: "ComponentStatus") -> str:
    return STATES[component.state] + (f": {component.reason}" if component.reason else "")


def waits_for(lag: "Lag", losses: Mapping[str, str]) -> str:
    """Return what a pipeline waits for, in one line; nothing if it waits for nothing. `losses` are by pipeline."""
    halted = "a person, as commits may be missing" if lag.pipeline in losses else None
    paused = f"paused by {lag.paused_by}: {lag.paused_reason}" if lag.paused_at else None
    planned = f"a plan that succeeds: {quoted(lag.plan_error)}" if lag.plan_error else None
    return "; then ".join(reason.rstrip(".") for reason in (halted, paused, planned, lag.waits_for) if reason)
