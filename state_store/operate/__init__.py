"""What operators do to batches, bad records and old rows, each action with its record."""
