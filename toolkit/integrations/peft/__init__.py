"""PEFT as a host: adapters of experts that are spread over ranks, saved as PEFT saves them. Needs peft to be called,
not to be imported."""
