"""Files in a folder, as a source: what a batch reads (`plan`), how it is read (`read`), and the formats."""
