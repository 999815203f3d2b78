"""The commands beside Lightning's, each with a function ``main(arguments)``."""
