"""The operating system: durable files, signals, processes, memory, text."""
