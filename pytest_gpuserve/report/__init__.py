"""Tell people: incidents, bundle, redaction, text."""
