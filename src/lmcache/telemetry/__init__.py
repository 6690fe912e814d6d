"""Metrics, logs and the events behind them."""
