"""The configuration of LMCache inside an engine, and the server that it stands for."""
