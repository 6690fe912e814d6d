"""L2: slower tiers behind adapters."""
