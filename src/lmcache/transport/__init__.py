"""Calls over ZMQ, without knowing what they mean: one server loop, one client connection."""
