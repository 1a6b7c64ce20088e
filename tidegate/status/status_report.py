"""The status of stack and pipelines, of one moment: as tables, as lines, and as JSON."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tidegate import output
from tidegate.explain.batch_causes import quoted
from tidegate.state_store.base.errors import TidegateError
from tidegate.state_store.base.settings import Settings

if TYPE_CHECKING:
    from tidegate.stack import ComponentStatus
    from tidegate.state_store.pipeline_changes.retirement import RetiredPipeline
    from tidegate.state_store.read_ledger.registered_pipelines import Lag

STATES = {"up": "up", "starting": "...", "stopped": "stopped", "gave up": "failed"}
PAGE_PATH = "/tidegate/"


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


def look(settings: Settings) -> Look:
    """Ask the stack and the ledger at the same time."""
    from tidegate import stack  # noqa: PLC0415 - verbs that do not need it start faster

    lags, retired, losses, trouble = [], [], {}, None
    with ThreadPoolExecutor(1) as beside:
        request = beside.submit(stack.status, settings)  # Airflow takes as long to answer as SQLAlchemy to load
        from tidegate.state_store import StateStore  # noqa: PLC0415

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
