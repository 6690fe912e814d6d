"""Between L1 and L2: store, prefetch and eviction controllers on one asyncio loop, and the policies they ask."""
