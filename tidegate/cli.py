"""The command line: one verb per thing a person does.

Exit codes are the error families: 0 done or already done, 1 a person has to look, 2 the request is wrong, 75 try again.
"""

import gc
import sys

import typer

from state_store.errors import PermanentError, TidegateError, UsageError
from tidegate import output
from tidegate.commands import demo, inspection, operations, pipelines, quarantine, runs, stack

PERMANENT, USAGE, TRY_AGAIN, INTERRUPTED = 1, 2, 75, 130
MAKE_BEFORE_LOOKING = 100_000  # objects that are made before garbage is looked for

app = typer.Typer(
    help="Exactly-once batch pipelines: Airflow decides when, Spark computes what, Postgres decides whether it counts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for module in (stack, pipelines, runs, inspection, operations, demo):
    for command in module.COMMANDS:
        app.command()(command)
records = typer.Typer(help="Bad records that were set aside: look at them, take them up again.", no_args_is_help=True)
for verb, command in quarantine.COMMANDS.items():
    records.command(verb)(command)
app.add_typer(records, name="quarantine")


def main() -> None:
    """Run the command line; every error of ours is one line and an exit code."""
    # What a command makes while it starts, it keeps: to look through it for garbage would take a third of a short one's time.
    gc.set_threshold(MAKE_BEFORE_LOOKING)
    try:
        app(standalone_mode=True)
    except TidegateError as error:
        output.say(f"tidegate: {error}")
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        output.say("tidegate: interrupted; what was committed stays, the rest is picked up by the next run.")
        sys.exit(INTERRUPTED)
    finally:
        gc.freeze()  # the interpreter, as it ends, would look through all of it as well


def exit_code(error: TidegateError) -> int:
    """Return the exit code of an error's family."""
    if isinstance(error, UsageError):
        return USAGE
    return PERMANENT if isinstance(error, PermanentError) else TRY_AGAIN
