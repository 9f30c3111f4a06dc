"""Fullbore: pipeline-parallel training of large language models with the pipe running full."""
