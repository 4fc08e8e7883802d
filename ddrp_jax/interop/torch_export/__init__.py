"""PyTorch code that travels with an export of a model that `transformers` has no class for."""
