"""Trains on rollouts with the kept-set logprob and publishes weights by version."""
