"""vLLM behind FastAPI, answering with the kept set of every sampled token."""
