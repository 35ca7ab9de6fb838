"""Integrations of expert parallelism with Accelerate, transformers and PEFT."""
