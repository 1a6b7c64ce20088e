"""The command line: one verb per thing a person does.

Exit codes are the error families: 0 done or already done, 1 a person has to look, 2 the request is wrong, 75 try again.
"""

import gc
import sys
from importlib import import_module
from io import StringIO

import click

from state_store.errors import PermanentError, TidegateError, UsageError
from tidegate import output

PERMANENT, USAGE, TRY_AGAIN, INTERRUPTED = 1, 2, 75, 130
MAKE_BEFORE_LOOKING = 200_000  # objects that are made before garbage is looked for; `status` makes 80,000

# In the order in which people come to need them, each with the module of `tidegate.commands` that it is in.
VERBS = {
    "up": "stack",
    "down": "stack",
    "status": "stack",
    "backup": "stack",
    "restore": "stack",
    "pipelines": "pipelines",
    "settings": "pipelines",
    "migrate": "pipelines",
    "trigger": "runs",
    "backfill": "runs",
    "run": "runs",
    "inspect": "inspection",
    "get": "inspection",
    "retry": "operations",
    "skip": "operations",
    "redo": "operations",
    "pause": "operations",
    "resume": "operations",
    "demo": "demo",
    "quarantine": "quarantine",
}


class Verbs(click.Group):
    """The verbs, each loaded when somebody asks for it: what all of them import takes as long as a short one's work."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - as click asks
        """Return the names in their order."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Load a verb; None if there is no such verb."""
        module = VERBS.get(cmd_name)
        return getattr(import_module(f"tidegate.commands.{module}"), cmd_name) if module else None


@click.group(cls=Verbs, context_settings={"show_default": True, "max_content_width": 110})
def app() -> None:
    """Exactly-once batch pipelines: Airflow decides when, Spark computes what, Postgres decides whether it counts."""


def main() -> None:
    """Run the command line; every error of ours is one line and an exit code."""
    # What a command makes while it starts, it keeps: to look through it for garbage would take a third of a short one's time.
    gc.set_threshold(MAKE_BEFORE_LOOKING)
    sys.excepthook = output.show_crash
    try:
        sys.exit(app(standalone_mode=False))
    except click.ClickException as wrong:
        wrong.show(said := StringIO())
        sys.stderr.write(output.visible(said.getvalue(), keep="\n"))
        sys.exit(wrong.exit_code)
    except TidegateError as error:
        output.say(f"tidegate: {error}")
        sys.exit(exit_code(error))
    except click.Abort:
        output.say("tidegate: interrupted; what was committed stays, the rest is picked up by the next run.")
        sys.exit(INTERRUPTED)
    finally:
        gc.freeze()  # the interpreter, as it ends, would look through all of it as well


def exit_code(error: TidegateError) -> int:
    """Return the exit code of an error's family."""
    if isinstance(error, UsageError):
        return USAGE
    return PERMANENT if isinstance(error, PermanentError) else TRY_AGAIN
