"""Tables of Delta Lake as a source: `log` reads what a version has, `plan` cuts it into batches, `read` reads their files."""
