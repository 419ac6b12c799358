"""Text-to-image policies."""
