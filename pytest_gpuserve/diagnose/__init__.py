"""Why not? Stacks, rank classes, signatures, evidence, triage, verdict."""
