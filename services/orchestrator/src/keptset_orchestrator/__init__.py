"""Collects rollouts, checks their kept sets, and drives trainer and inference step by step."""
