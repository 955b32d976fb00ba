"""Direct notifications: from documents to Alertmanager and to Kubernetes Events, past Prometheus."""
