"""A tiny model made from nothing on this machine, for demos and tests: it reverses strings, but not well."""
