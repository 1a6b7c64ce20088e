"""An author's transform is run, checked, and answered what it asks of states."""
