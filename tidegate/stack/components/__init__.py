"""The servers of the embedded stack, and what they need to run."""
