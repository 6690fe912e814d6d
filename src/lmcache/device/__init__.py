"""How a worker reaches the engine's KV tensors."""
