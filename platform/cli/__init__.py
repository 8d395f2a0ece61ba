"""The command line: parses arguments, calls the library, prints what came of it."""
