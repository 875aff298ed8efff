"""Tests: `unit` mirrors the package, `distributed` and `parity` run several ranks, `gpu` needs devices."""
