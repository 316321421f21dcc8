"""The sections of scripts/gpu_check.py and what they share."""
