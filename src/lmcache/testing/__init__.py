"""Real servers and engines for the demo, the benchmarks and the tests."""
