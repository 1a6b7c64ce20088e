"""The name under which the ledger keeps who has done something from the command line."""

import os

from tidegate.state_store.base.errors import storable
from tidegate.state_store.base.project import account_name


def operator(verb: str) -> str:
    """Return the operator's name for the ledger: the account, the name that the environment claims, and the verb."""
    account, claimed = account_name(os.getuid()), os.environ.get("SUDO_USER") or os.environ.get("LOGNAME")
    name = account if claimed in (None, "", account) else f"{account} (says {claimed})"
    return storable(f"{name}, tidegate {verb}")
