"""Tables of Apache Iceberg as a source: `table` finds what one has, `plan` makes batches of it."""
