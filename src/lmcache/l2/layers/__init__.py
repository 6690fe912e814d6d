"""The layers between the storage loop and an adapter. `stack.py` shows their order."""
