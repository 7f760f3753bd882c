"""The kept-token payload that travels through rollout, orchestrator and trainer."""
