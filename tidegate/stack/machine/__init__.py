"""What the stack asks of its machine: private files, disk, the digest of its code."""
