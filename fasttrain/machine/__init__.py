"""The machine: what it has, what this process may use of it, and how many threads it gets."""
