"""The storage backend of SGLang's hierarchical cache."""
