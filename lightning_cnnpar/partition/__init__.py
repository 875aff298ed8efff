"""Cutting a network into stages, on a plan that `torch.fx` makes and with the original modules."""
