"""The reader of each format. A new format is one more module in `formats/`, and one more entry here."""

from jobs.sources.files.formats.csv import CsvReader
from jobs.sources.files.formats.json import JsonReader
from jobs.sources.files.formats.parquet import ParquetReader
from jobs.sources.files.formats.text import TextReader
from jobs.sources.files.read import FileReader

READERS: dict[str, type[FileReader]] = {"parquet": ParquetReader, "csv": CsvReader, "json": JsonReader, "text": TextReader}
