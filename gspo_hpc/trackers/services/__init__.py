"""One file for each tracker. A library is imported when its tracker is opened, never before."""
