"""The record of operators' actions: who did what to which pipeline or batch, and why."""

from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from tidegate.state_store.ledger import tables


def write_action(connection: Connection, pipeline: str, txid: int | None, action: str, owner: str, reason: str) -> None:
    """Record an operator's action, in the transaction that carries it out."""
    row = {"pipeline": pipeline, "txid": txid, "action": action, "owner": owner, "reason": reason}
    connection.execute(insert(tables.operator_action).values(row))
