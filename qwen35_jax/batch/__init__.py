"""Offline batch jobs: JSONL in, JSONL out."""
