"""The gradients of a stage, averaged over the replicas."""
