"""Pre-train and repair encoder language models in JAX (DDRP + MTH, DefinitionEMB)."""

__version__ = "0.1.0"
