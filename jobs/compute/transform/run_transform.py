"""Applies an author's transform to a batch's DataFrames, and checks what it returns."""

from collections.abc import Collection, Mapping

import grpc
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from tidegate.jobs.compute.sessions.session import PINNED
from tidegate.jobs.compute.transform.transform_purity import check_pure, meeting, unread
from tidegate.jobs.pipeline import Transform
from tidegate.jobs.spark.library_internals import settings_kept
from tidegate.state_store.base import errors, process_exits


class Frames(dict[str, DataFrame]):
    """The DataFrames that a transform of several inputs gets, by the names of inputs and references."""

    def __missing__(self, name: str) -> DataFrame:
        """Refuse a name that is no input.

        Raises: DeclarationInvalid.
        """
        raise errors.DeclarationInvalid(f"The transform asks for input {name!r}; the pipeline has {', '.join(self)}.")


def apply_transform(transform: Transform, frames: Frames, columns: Collection[str]) -> DataFrame:
    """Return the transformed rows, most often as a plan: no row has been read yet.

    The transform of a single source gets the frame "", that of several inputs all frames. `columns` are those of all frames.

    Raises: DeclarationInvalid if the code is at fault; errors of Spark, files, memory and imports as they are.
    """
    try:
        with settings_kept(next(iter(frames.values())).sparkSession, PINNED), process_exits.as_errors():
            returned = transform(frames.get("", frames))
    except (errors.TidegateError, PySparkException, grpc.RpcError, OSError, MemoryError, ImportError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise errors.DeclarationInvalid(f"The transform failed: {errors.class_and_text(error)}") from error
    if returned is None:
        raise errors.DeclarationInvalid(
            "The transform returns nothing: end it with return, and the DataFrame that it has made."
        )
    if not isinstance(returned, DataFrame):
        raise errors.DeclarationInvalid(f"The transform returns {type(returned).__name__}; it has to return a DataFrame.")
    try:
        check_pure(list(frames.values()), returned, columns)
    except RecursionError as error:
        raise errors.DeclarationInvalid(
            "The transform's plan is nested too deeply. Where it calls withColumn() or adds to an expression in a loop, make "
            "all columns by one select()."
        ) from error
    return returned


def check_used(returned: DataFrame, frames: Mapping[str, DataFrame]) -> None:
    """Refuse a transform that leaves out one of these frames: Spark would not read it, so no lost row would be noticed.

    Raises: DeclarationInvalid.
    """
    if unused := unread(returned, frames):
        raise errors.DeclarationInvalid(
            f"The transform does not use {unused[0]}: each row that is read has to be seen. Take it out of the Inputs, or have "
            "the transform join or unite it with the others."
        )


def check_united(returned: DataFrame, inputs: Mapping[str, DataFrame]) -> None:
    """Refuse a transform that joins inputs, rather than uniting them, where bad records are set aside.

    A record is taken up in a batch without the rows of other inputs that it was to meet: those have counted without it.

    Raises: DeclarationInvalid.
    """
    if len(inputs) > 1 and (found := meeting(returned, inputs)):
        raise errors.DeclarationInvalid(
            f"The transform joins input {found[0]} with input {found[1]}, so bad records cannot be set aside: one that is "
            "taken up later would miss the rows of the other input that it was to be joined with. Inputs may be united "
            "(unionByName), and joined with references or with a state (state_query). Otherwise declare on_poison='block' or "
            "'skip'."
        )
