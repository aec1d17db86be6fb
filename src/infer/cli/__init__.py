"""The command line. Nothing here imports torch until a model is to be loaded."""
