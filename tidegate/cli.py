"""The command line: one verb per thing a person does.

Exit codes are the error families: 0 done or already done, 1 a person has to look, 2 the request is wrong, 75 try again.
"""

import gc
import sys

import click

from state_store.errors import PermanentError, TidegateError, UsageError
from tidegate import output
from tidegate.commands import demo, inspection, operations, pipelines, quarantine, runs, stack

PERMANENT, USAGE, TRY_AGAIN, INTERRUPTED = 1, 2, 75, 130
MAKE_BEFORE_LOOKING = 100_000  # objects that are made before garbage is looked for


class InOrder(click.Group):
    """A group whose help lists the verbs in the order in which people come to need them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - as click asks
        """Return the names as they were added."""
        return list(self.commands)


@click.group(cls=InOrder, context_settings={"show_default": True, "max_content_width": 110})
def app() -> None:
    """Exactly-once batch pipelines: Airflow decides when, Spark computes what, Postgres decides whether it counts."""


for module in (stack, pipelines, runs, inspection, operations, demo, quarantine):
    for command in module.COMMANDS:
        app.add_command(command)


def main() -> None:
    """Run the command line; every error of ours is one line and an exit code."""
    # What a command makes while it starts, it keeps: to look through it for garbage would take a third of a short one's time.
    gc.set_threshold(MAKE_BEFORE_LOOKING)
    try:
        sys.exit(app(standalone_mode=False))
    except click.ClickException as wrong:
        wrong.show()
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
