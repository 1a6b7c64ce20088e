"""The verbs, by what they are about: the stack, pipelines and tables, runs, looking, what people do by hand."""

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]
PipelineName = Annotated[str, typer.Argument(metavar="PIPELINE", help="The pipeline's name; see: tidegate pipelines")]
