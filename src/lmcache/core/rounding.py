"""Integers rounded up."""

from __future__ import annotations


def div_ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `value`."""
    return div_ceil(value, unit) * unit
