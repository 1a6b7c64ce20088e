"""Names of files that are left alone: unfinished uploads, editors' copies, and what writers hide with ``.`` or ``_``.

A glob takes such names only if it says so itself: ``_*.csv``, ``{_,}*.csv``, ``*.part``.
"""

import re

HIDDEN = "starts with . or _, as what writers keep for themselves does"
UNFINISHED = "ends like a file that is not finished, or like an editor's copy of one"
_UNFINISHED = re.compile(
    r"\.(tmp|temp|part|partial|filepart|inprogress|incomplete|uploading|writing|crdownload|download|swp|swo|bak|lock|_COPYING_)$"
    r"|~$|^#.*#$",
    re.IGNORECASE,
)


def is_hidden(name: str) -> bool:
    """Return whether writers reserve this name."""
    return name.startswith((".", "_"))


def is_finished(part: str, name: str) -> bool:
    """Return whether a name has no ending of unfinished files, or one that the glob asks for."""
    return not _UNFINISHED.search(name) or _UNFINISHED.search(part) is not None
