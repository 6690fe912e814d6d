"""The L1 tier: the native core together with the memory that it manages."""
