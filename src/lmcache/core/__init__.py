"""Pure values: keys, chunk hashes, layouts, frames, outcomes, limits."""
