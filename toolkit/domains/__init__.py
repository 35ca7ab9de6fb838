"""What only one subject needs: its data, model, task and callbacks together."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, ["activity", "autoencoder", "continual", "few_labels", "speech"]
)
