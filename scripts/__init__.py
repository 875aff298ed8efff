"""Tools for the project itself."""
