"""Runs a whole Keptset training on this machine: inference, orchestrator and trainer."""
