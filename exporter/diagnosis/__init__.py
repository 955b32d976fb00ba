"""What happened and what to do: pure functions over signals. No I/O, no clock, no Prometheus."""
