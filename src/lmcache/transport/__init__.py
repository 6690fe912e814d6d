"""Calls over ZMTP, without knowing what they mean: one server loop, one client connection."""
