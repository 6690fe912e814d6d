"""The connector for vLLM and the import paths that vLLM expects."""
