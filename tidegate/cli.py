"""The command line: one verb per user action, the module of each verb, and exit codes.

Exit codes are the error families: 0 done or already done, 1 needs a person, 2 the request is wrong, 75 try again.
"""

import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from io import StringIO

import click
from click.shell_completion import CompletionItem

from tidegate import output
from tidegate.state_store.base.errors import PermanentError, TidegateError, UsageError

PERMANENT, USAGE, TRY_AGAIN = 1, 2, 75
INTERRUPTED = 130  # after Ctrl-C
READER_GONE = 1  # as click has it
COMPLETE = "_TIDEGATE_COMPLETE"  # by which a shell asks click for words
GC_THRESHOLD = 200_000  # objects allocated before a garbage collection; `status` allocates 80,000

# In the order in which users come to need them, each with its module in `tidegate.commands`.
VERBS = {
    "init": "setup.init_verb",
    "up": "setup.stack_verbs",
    "down": "setup.stack_verbs",
    "status": "setup.stack_verbs",
    "doctor": "setup.doctor_verb",
    "backup": "setup.stack_verbs",
    "restore": "setup.stack_verbs",
    "pipelines": "setup.pipeline_verbs",
    "settings": "setup.pipeline_verbs",
    "migrate": "setup.pipeline_verbs",
    "trigger": "act.run_verbs",
    "backfill": "act.run_verbs",
    "run": "act.run_verbs",
    "why": "show.why_verbs",
    "explain": "show.why_verbs",
    "inspect": "show.inspect_verb",
    "get": "show.state_verbs",
    "changes": "show.state_verbs",
    "query": "show.query_verb",
    "retry": "act.operator_verbs",
    "skip": "act.operator_verbs",
    "redo": "act.operator_verbs",
    "prune": "act.operator_verbs",
    "pause": "act.operator_verbs",
    "resume": "act.operator_verbs",
    "rebuild": "act.rebuild_verb",
    "retire": "act.retire_verbs",
    "reinstate": "act.retire_verbs",
    "demo": "setup.demo_verb",
    "quarantine": "act.quarantine_verbs",
    "error": "show.why_verbs",
}


class Verbs(click.Group):
    """The verbs, each loaded on demand: importing all of them takes as long as running a short one."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - as click asks
        """Return the verbs' names in their order."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Load a verb; None if there is no such verb."""
        module = VERBS.get(cmd_name)
        return getattr(import_module(f"tidegate.commands.{module}"), cmd_name) if module else None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the verbs and options that start like this; no verb is loaded."""
        names = [CompletionItem(name) for name in VERBS if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


@click.group(cls=Verbs, context_settings={"show_default": True, "max_content_width": 110})
@click.version_option(package_name="tidegate", message="%(package)s %(version)s")
def app() -> None:
    """Exactly-once batch pipelines: Airflow decides when, Spark computes what, Postgres decides whether it counts."""


def main() -> None:
    """Run the command line; a TidegateError becomes its message, where to read more, and an exit code."""
    # Objects created during start-up stay alive: collecting garbage among them would take a third of a short verb's time.
    gc.set_threshold(GC_THRESHOLD)
    sys.excepthook = output.show_crash
    output.keep_standard_output()
    if {"--help", "--version"}.intersection(sys.argv) or COMPLETE in os.environ:
        sys.stdout = output.data()  # click prints these itself
    try:
        code = app(standalone_mode=False)
        output.data().flush()
        sys.exit(code)
    except BrokenPipeError:  # such as by `| head`; what is left in the buffer is not wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.data().fileno())
        sys.exit(READER_GONE)
    except click.ClickException as wrong:
        wrong.show(message := StringIO())
        sys.stderr.write(output.visible(message.getvalue(), keep="\n"))
        sys.exit(wrong.exit_code)
    except TidegateError as error:
        output.say(f"tidegate: {error}")
        from tidegate.explain import error_pages  # noqa: PLC0415 - no command that succeeds needs it

        if error_pages.has_page(error.code):  # an author's own source may raise its own errors
            output.say(error.more)
        sys.exit(exit_code(error))
    except click.Abort:
        output.say("tidegate: interrupted; what was committed stays, the rest is picked up by the next run.")
        sys.exit(INTERRUPTED)
    finally:
        with suppress(BrokenPipeError):
            output.data().flush()
        gc.freeze()  # or the interpreter would collect garbage once more at exit


def exit_code(error: TidegateError) -> int:
    """Return the exit code of an error's family."""
    if isinstance(error, UsageError):
        return USAGE
    return PERMANENT if isinstance(error, PermanentError) else TRY_AGAIN
