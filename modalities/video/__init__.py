"""Text-to-video policies."""
