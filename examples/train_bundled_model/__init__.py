"""Makes the small model that ships in `mpjax/bundled`, from data to checkpoint.

The model is trained on the sources of Python's own standard library, which every Python
installation carries, so nothing has to be downloaded. Run it from the repository root:

    python -m examples.train_bundled_model --help
"""
