"""`POST /keptset/v1/weights`: check a published version, then put it into the running engine."""
