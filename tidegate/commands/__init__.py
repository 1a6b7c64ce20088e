"""The verbs, by what they are about: the stack, pipelines and tables, runs, looking, what people do by hand."""

import click

AT_LEAST_ONE = click.IntRange(min=1)

pipeline_name = click.argument("pipeline", help="The pipeline's name; see: tidegate pipelines")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of tables.")
verbose = click.option("--verbose", "-v", is_flag=True, help="Show what the engine logs.")
