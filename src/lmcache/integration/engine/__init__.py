"""What the connector of any engine is built from. Knows no engine's types; those are in the packages beside it."""
