"""What can go wrong in a network call, by name."""


class PipelineError(RuntimeError):
    """A network call could not be carried out over the stages of a replica."""


class CollectiveMismatchError(PipelineError):
    """The ranks of a replica were in different network calls."""


class PeerError(PipelineError):
    """A rank of the replica did not answer in time, or went away."""
