"""What is served over HTTP: metrics, JSON and pages, behind TLS and passwords where configured."""
