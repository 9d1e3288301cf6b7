"""Keep it alive: supervisor, lifecycle, readiness, ports and leases."""
