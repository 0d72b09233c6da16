"""Texts of models and data sets on the report."""
