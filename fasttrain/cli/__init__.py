"""The command line: options in, views and documents out, errors as sentences with exit codes."""
