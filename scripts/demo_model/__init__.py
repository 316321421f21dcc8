"""The demo model: its tasks and data, its training, its export."""
