"""All vLLM servers of a Kubernetes node, followed by one process: who is there, and where its log is."""
