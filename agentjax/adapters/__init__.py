"""Adapters: code for outside packages, programs and services. The core chooses them by name."""
