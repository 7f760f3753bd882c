"""`POST /inference/v1/generate`: token ids in; token ids, logprobs and kept sets out."""
