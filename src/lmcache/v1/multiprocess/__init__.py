"""Import paths that vLLM and documented command lines expect."""
