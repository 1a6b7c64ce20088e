"""An author's transform: what it gets, and what has to come of it."""

from collections.abc import Collection, Mapping

import grpc
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from jobs.compute.purity import check_pure, unread
from jobs.pipeline import Transform
from state_store import errors


class Frames(dict[str, DataFrame]):
    """The DataFrames that a transform of several inputs gets, by the names of inputs and references."""

    def __missing__(self, name: str) -> DataFrame:
        """Say which names there are.

        Raises: DeclarationInvalid.
        """
        raise errors.DeclarationInvalid(f"The transform asks for input {name!r}; the pipeline has {', '.join(self)}.")


def apply_transform(transform: Transform, frames: Frames, columns: Collection[str]) -> DataFrame:
    """Return the transformed rows: most often just a plan, and no row has been read.

    A source by itself has the one frame "", and its transform gets that. `columns` are those of all frames.

    Raises: DeclarationInvalid if the code is at fault. Errors that may mean that something is away are passed on.
    """
    try:
        returned = transform(frames.get("", frames))
    except (errors.TidegateError, PySparkException, grpc.RpcError, OSError, MemoryError, ImportError):
        raise
    except (Exception, SystemExit) as error:
        raise errors.DeclarationInvalid(f"The transform failed: {type(error).__name__}: {error}") from error
    if returned is None:
        raise errors.DeclarationInvalid(
            "The transform returns nothing: end it with return, and the DataFrame that it has made."
        )
    if not isinstance(returned, DataFrame):
        raise errors.DeclarationInvalid(f"The transform returns {type(returned).__name__}; it has to return a DataFrame.")
    check_pure(list(frames.values()), returned, columns)
    return returned


def check_used(returned: DataFrame, frames: Frames, observed: Mapping[str, str]) -> None:
    """Refuse a transform that leaves an input or a reference out, of which no row could be missed then.

    `observed` are the names of those to look for, each with the name under which its rows are counted.

    Raises: DeclarationInvalid.
    """
    if unused := unread(returned, frames, observed):
        raise errors.DeclarationInvalid(
            f"The transform does not use {unused[0]}: each row that is read has to be seen. Take it out of the Inputs, or have "
            "the transform join or unite it with the others."
        )
