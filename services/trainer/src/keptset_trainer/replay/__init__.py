"""`keptset-trainer replay`: a stored step scored again, offline, by the weights that its tokens came from."""
