"""Fixtures of several areas."""

from unit.device.fake_cuda import fake_cuda as fake_cuda
