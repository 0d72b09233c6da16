"""Files of data: their kinds, the rows in them, and which of a folder belong together."""
