"""The formats of `Files`: Parquet and those of text, with the parts that Spark's tasks run in modules of their own.

A new one is a reader here, its name in `Format` and in `tidegate.jobs.sources.binding`, and its options in
`tidegate.jobs.sources.files.formats.text_files.text_options`; mypy refuses a name without a reader.
"""

from typing import Literal

Format = Literal["parquet", "csv", "json", "text"]
