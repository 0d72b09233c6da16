"""The command line: one file a command, and the pages that commands print."""
