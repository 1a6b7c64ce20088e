"""The formats of `Files`: Parquet and those of text, with the parts that Spark's tasks run in modules of their own.

A new one of text is a parser in `records`, and its name in `Format`; `text_files` makes the parser (`text_reader`), and knows
its options (`text_options`).
"""

from typing import Literal

Format = Literal["parquet", "csv", "json", "text"]
