"""Tree attention: a dense oracle and the backends registered with vLLM."""
