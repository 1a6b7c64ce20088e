"""What an operator does when a batch cannot go on by itself."""

import getpass
from typing import Annotated

import typer

from jobs.registry import find_pipeline
from state_store.errors import UsageError
from state_store.settings import Settings
from tidegate import output
from tidegate.commands import AsJson, PipelineName


def skip(
    pipeline: PipelineName,
    txid: Annotated[int, typer.Argument(min=1, help="The txid that has failed.")],
    reason: Annotated[str, typer.Option(help="Why, for those who look at the ledger later.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without this, only tell what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give up a batch that cannot be processed: order goes on without its rows, and the ledger says who and why."""
    from state_store import StateStore  # noqa: PLC0415 - loads SQLAlchemy, which other verbs do without

    spec = find_pipeline(pipeline).spec
    if not reason.strip():
        raise UsageError("Give a reason: --reason 'the exporter cut the file off'")
    with StateStore.connect(Settings.load()) as store:
        status = store.batch_history(pipeline, txid).status
        if not yes and status.phase not in ("committed", "skipped"):
            raise UsageError(
                f"{pipeline} {txid} is {status.phase} ({status.waits_for}). Skipping it leaves all its rows out of the states, "
                "for good. Add --yes to do it."
            )
        done = store.skip_batch(spec, txid, f"{getpass.getuser()}, tidegate skip", reason)
    if as_json:
        skipped = done is None or done.skipped_reason is not None
        output.print_json({"txid": txid, "skipped": skipped, "already": done is not None and done.already_committed})
    else:
        told = (
            str(done) if done else f"{pipeline} {txid} is given up: it is skipped as soon as the txids before it have committed"
        )
        output.say(f"{told}. Go on: tidegate trigger {pipeline} --wait")


COMMANDS = (skip,)
