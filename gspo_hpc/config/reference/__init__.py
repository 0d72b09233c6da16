"""Reference of the keys of a config, for readers and editors: the JSON schema, and the list of settings made of it."""
