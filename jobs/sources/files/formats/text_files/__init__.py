"""CSV, JSON and plain text files: their options, a scan in the driver, reading in tasks."""
