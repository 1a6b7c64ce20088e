<%!
def written(steps):
    """Return the steps without Alembic's comments, which ask for changes by hand."""
    return "\n".join(line for line in (steps or "pass").splitlines() if not line.strip().startswith("# ###")).strip()


def quoted(message):
    """Return a message as it stands in a docstring, such as one with a path of Windows."""
    return message.replace("\\", "\\\\").replace('"', '\\"')
%>"""${quoted(message)}."""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    ${written(upgrades)}
