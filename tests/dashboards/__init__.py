"""What the tests of the dashboards need: data to look at, and Grafana's way of asking for it."""
