"""Every hook of the plugin, each a line or two of delegation."""
