"""The path by which routers import the controller."""
