"""The `lmcache` command: one file a command, imported only when it is used."""
