"""The law of docs/protocol.md as a model, walked exhaustively by itself, and compared with the real store step by step."""
