"""The demo: sample data, the stack, both pipelines of the examples through Airflow, and their results."""

import shutil

import click

from tidegate import output, sample_data
from tidegate.commands.act import run_verbs
from tidegate.commands.setup import stack_verbs
from tidegate.commands.show.inspect_verb import inspect
from tidegate.jobs.registry import pipeline_names
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.base.settings import Settings
from tidegate.status import status_report

PIPELINES = {"word_count": "word_count", "flights": "daily"}  # with the state that is shown
NEXT_STEPS = """\
Look further, with this stack up:
{activate}  cd {home}
  tidegate get flights daily UA 2013-01-01    one key of a state
  tidegate inspect flights --txid 3           everything about one batch
  tidegate trigger flights --wait             nothing new, so nothing is spent
  tidegate status                             how pipelines and stack are
Airflow shows the same runs at {url} (user {user}, password in {password_file}).
The operator's page, for the same user, shows what flows, what waits and why: {page}
End it: tidegate down"""


@click.command()
@click.pass_context
def demo(context: click.Context) -> None:
    """Split the sample data into files, start the stack, run the examples, show the results. Safe to repeat."""
    settings = Settings.load()
    if missing := sorted(PIPELINES.keys() - pipeline_names()):
        raise UsageError(
            f"{settings.home} has no pipeline {' and no '.join(missing)}. The demo runs those of the examples: "
            "make demo in Tidegate's repository, or this verb in its folder examples."
        )
    for folder, count in sample_data.prepare(settings.home).items():
        output.say(f"{settings.home / folder}: {count} files")
    context.invoke(stack_verbs.up)
    for pipeline in PIPELINES:
        context.invoke(run_verbs.trigger, pipeline=pipeline, wait=True)
    for pipeline, state in PIPELINES.items():
        context.invoke(inspect, pipeline=pipeline, state=state, limit=10)
    context.invoke(inspect, pipeline="flights", limit=10)
    settings = Settings.load()
    output.say(
        NEXT_STEPS.format(
            activate=""
            if shutil.which("tidegate")
            else "  . .venv/bin/activate                       once, so that tidegate is found\n",
            home=output.to_paste(settings.home),
            url=settings.airflow_url,
            user=settings.airflow_user,
            password_file=settings.airflow_password_file,
            page=status_report.page_address(settings),
        )
    )
