"""The HTTP interface of a coordinator: a file for each group of operations."""
