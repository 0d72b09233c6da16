"""Sections of the config that have a file of their own."""
