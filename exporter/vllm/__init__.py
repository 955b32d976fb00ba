"""Everything that knows vLLM's formats, by version, and nothing else."""
