"""What an attempt leaves for the commit: staged rows, and the seal of the newest attempt."""
