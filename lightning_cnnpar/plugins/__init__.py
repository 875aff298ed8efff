"""Lightning plugins: precision and checkpoint files."""
