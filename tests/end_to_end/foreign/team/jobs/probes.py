"""What a process has imported, and from where."""

import json
import os
import sys
from pathlib import Path


def note(process: str) -> None:
    """Write the files of this process' modules, and its path."""
    files = {
        name: file for name, module in [*sys.modules.items()] if isinstance(file := getattr(module, "__file__", None), str)
    }
    place = Path(os.environ["SEEN"]) / f"{process}-{os.getpid()}.json"
    place.write_text(json.dumps({"files": files, "path": sys.path}))
