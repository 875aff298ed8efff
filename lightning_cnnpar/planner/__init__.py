"""Choosing a layout from a profile of the network and a description of the cluster."""
