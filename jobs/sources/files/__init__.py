"""A source of files in a folder: planning (`plan`), reading (`read`), and the formats."""
