"""RLlib: how the algorithm is trained."""
