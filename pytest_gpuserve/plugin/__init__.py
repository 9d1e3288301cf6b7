"""All that knows pytest."""
