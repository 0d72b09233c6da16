"""The parts, a file each: `run(setting, record)` measures, and records figures and verdicts."""
