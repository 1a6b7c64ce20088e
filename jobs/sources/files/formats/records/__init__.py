"""Text is split into records, and records into columns of declared types."""
