"""What octavo tells those who run it: metrics, logs and traces."""
