"""Language models: small ones, their samples and model cards, and fine-tuning with adapters."""
