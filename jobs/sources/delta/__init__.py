"""Tables of Delta Lake as a source: `log` reads what a version has, `plan` makes batches of it."""
