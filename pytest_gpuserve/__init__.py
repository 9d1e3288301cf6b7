"""pytest-gpuserve: integration tests for GPU inference servers, with a hang watchdog that names the rank.

Importing this package imports nothing else: the plugin must cost a session that does not use it nothing.
"""

__version__ = "0.1.0"
