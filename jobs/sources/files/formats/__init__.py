"""The formats of `Files`: a module for each, with the parts that Spark's tasks run in modules of their own.

A new one is a module here, its name in `Format`, its reader in `tidegate.jobs.sources.binding`, and its options in
`tidegate.jobs.sources.files.formats.text_files.text_options`; mypy refuses a name without a reader.
"""

from typing import Literal

Format = Literal["parquet", "csv", "json", "text"]
