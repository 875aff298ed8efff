"""One network call of the user's step, run as microbatches through the stages of a replica."""
