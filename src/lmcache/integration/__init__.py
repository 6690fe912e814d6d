"""What runs inside an engine."""
