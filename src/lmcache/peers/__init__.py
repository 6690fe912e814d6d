"""Servers load from each other what they hold: members, protocol (docs/formats/peers.md), listener and adapter."""
