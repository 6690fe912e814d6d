"""Memory that server and engines share."""
