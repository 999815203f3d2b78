"""PyTorch Lightning modules, callbacks and a command line for compositional entropic risk minimisation."""

__version__ = "0.1.0"
