"""Texts of other projects: whose run a text is, and its arguments as they are given."""
