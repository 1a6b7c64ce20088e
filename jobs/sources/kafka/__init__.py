"""A source of Kafka topics."""
