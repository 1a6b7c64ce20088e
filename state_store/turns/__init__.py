"""When a batch may begin or commit, and how an attempt at it begins."""
