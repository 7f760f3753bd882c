"""Settings of every Keptset service and of a whole run; validated anywhere, without torch or vllm."""
