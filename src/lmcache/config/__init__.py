"""What can be configured, and how flags, environment and file become one value."""
