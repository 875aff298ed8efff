"""Gradients on the wire in fewer bits, with error feedback."""
