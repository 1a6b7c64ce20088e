"""Tables of Apache Iceberg as a source: `table` finds what one has, `plan` cuts it into batches, `read` reads their files."""
